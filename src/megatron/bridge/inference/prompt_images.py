# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: what the engine has to know of them, and which tokens of a prompt see later ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.bridge.backends.attention.block_mask import AttentionWindow, looking_ahead
from megatron.bridge.data.media.positions import Positions
from megatron.bridge.data.media.references import MediaReference
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.models.vision.merge import look_ahead
from megatron.bridge.utils.errors import UserError


@dataclass(frozen=True)
class PromptImages:
    """The images and videos of a prompt."""

    references: tuple[MediaReference, ...]
    rows: NDArray[np.int64]  # [prompt], the row of the features that replaces each embedding; -1 for text
    positions: Positions | None = None  # [3, prompt], of models whose positions have three axes

    def positions_of(self, start: int, count: int) -> Positions:
        """Positions [3, count] of the prompt's tokens, and of generated ones behind it, which count on as text."""
        assert self.positions is not None
        known = self.positions[:, start : start + count]
        length = self.positions.shape[1]
        later = np.arange(max(start, length), start + count) - length + self.positions.max() + 1
        return np.concatenate((known, np.broadcast_to(later, (3, len(later)))), axis=1)


class TokensWithImages(list[int]):
    """The token ids of a prompt, with placeholders for the tokens of its ``images``."""

    def __init__(self, tokens: Sequence[int], images: PromptImages) -> None:
        super().__init__(tokens)
        self.images = images


class PromptSight:
    """What the tokens of a prompt see beside earlier tokens: images, and tokens behind them."""

    def __init__(self, config: Any, has_processor: bool) -> None:
        self._config = config
        self._has_processor = has_processor
        has_tower = getattr(config, "vision", None) is not None
        tokens = (config.image_token_id, config.video_token_id) if has_tower else ()
        self.placeholders = frozenset(token for token in tokens if token is not None)

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse images without a tower, placeholders without images, and what sees further than a window."""
        images = getattr(prompt, "images", None)
        if images is not None and not (self.placeholders and self._has_processor):
            raise UserError("the prompt has images, and the model has no vision tower: remove them")
        if images is None and (found := self.placeholders.intersection(prompt)):
            raise UserError(
                f"the prompt has token {min(found)}, which stands for an image, and no images: give a conversation "
                "with image parts, or remove the token"
            )
        if sampling.prompt_logprobs is not None and getattr(self._config, "bidirectional_prompt", False):
            raise UserError(
                "prompt_logprobs: the tokens of the prompt see each other both ways, so none is predicted from those "
                "before it: leave it out"
            )
        ahead = self._ahead(prompt)
        if ahead is not None and self._config.window_size is not None:
            looking_ahead(torch.tensor([ahead]), AttentionWindow(self._config.window_size[0], 0))

    def facts(self, prompt: Sequence[int]) -> dict[str, Any]:
        """``images`` and ``ahead`` of ``scheduler.Text``."""
        return {"images": getattr(prompt, "images", None), "ahead": self._ahead(prompt)}

    def _ahead(self, prompt: Sequence[int]) -> list[int] | None:
        if getattr(self._config, "bidirectional_prompt", False):
            return list(range(len(prompt)))[::-1]
        if getattr(self._config, "bidirectional_images", False) and hasattr(prompt, "images"):
            found: list[int] = look_ahead(torch.tensor([prompt]), self._config.image_token_id)[0].tolist()
            return found
        return None
