# SPDX-License-Identifier: Apache-2.0
"""What data and inference need from the processor of a multimodal checkpoint."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron.bridge.data.media.downloads import fetched
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.positions import Positions
from megatron.bridge.data.media.references import MediaReference


class MediaProcessor(ABC):
    """Processes the images and videos, or the audio, of a run."""

    kind: str
    """``model_type`` of the checkpoint."""
    token: str
    """The placeholder that stands for one feature."""
    token_ids: list[int]
    """The tokens whose embeddings features of the tower replace."""
    chat_template: str | None = None
    """The template of the processor, which takes precedence over the tokenizer's."""

    def __init__(self, rules: MediaRules) -> None:
        self.rules = rules
        self.root = Path(rules.root)
        self.max_image_tokens = rules.max_image_tokens
        self.share: tuple[int, int] | None = (0, 1)
        """See ``DatasetRequest.image_share``."""

    @property
    def has_grids(self) -> bool:
        """Whether positions have three axes."""
        return False

    def fetched(self, named: Iterable[tuple[str, Any]], location: str) -> list[tuple[str, Any]]:
        """What a record names, with URLs replaced by downloaded files where the run allows that."""
        if not self.rules.fetches:
            return list(named)
        return [(kind, fetched(raw, self.root, location)) for kind, raw in named]

    @abstractmethod
    def placeholder(self, media: MediaReference | None = None) -> str:
        """The text that a chat template writes for ``media``."""

    @abstractmethod
    def description(self, has_videos: bool) -> str:
        """The processor and its limits."""

    @abstractmethod
    def key(self) -> str:
        """A hash of everything that the tokens of media depend on."""

    @abstractmethod
    def references(self, named: Iterable[tuple[str, Any]], location: str) -> list[MediaReference]:
        """References to what a record names: its kind (a key of ``MARKS``), and what the record says about it."""

    @abstractmethod
    def text(self, media: MediaReference) -> str:
        """The text that replaces the placeholder of ``media``."""

    @abstractmethod
    def tokens(self, media: MediaReference) -> int:
        """Number of tokens of ``media`` that features replace."""

    @abstractmethod
    def pixels(self, media: Sequence[MediaReference]) -> dict[str, Tensor]:
        """The tensors of all ``media`` under transformers' names; what other ranks encode may be zeros."""

    def positions(self, tokens: np.ndarray, media: Sequence[MediaReference]) -> Positions:
        """Positions [3, sequence] of the tokens of one sample, if ``has_grids``."""
        raise NotImplementedError

    def total_tokens(self, media: Iterable[MediaReference]) -> int:
        """Number of tokens of all ``media`` that features replace."""
        return sum(map(self.tokens, media))


def hash_of(values: Sequence[Any]) -> str:
    """A short hash of plain values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
