# SPDX-License-Identifier: Apache-2.0
"""Fill in the middle: some documents are cut in three and put together in another order.

A model that is to complete code between two pieces of code learns it from such documents (Bavarian et al. 2022,
"Efficient Training of Language Models to Fill in the Middle"). They are cut between characters, not tokens,
because a cursor stands anywhere.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.bridge.data.config import FIMConfig
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron.bridge.utils.errors import UserError


class _Samples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class FIMDataset(Dataset[dict[str, Any]]):
    """Samples of another data set, some of their documents rearranged.

    A sample depends on its number and the seed only. It keeps its length: what the three added tokens push out is
    left out at the end, and what is missing (characters may become fewer tokens) is end-of-document tokens that
    are not learnt.

    Args:
        samples: ``tokens`` and ``labels`` of whole rows.
        config: how.
        tokenizer: that of the samples.
        seed: seed of the cuts.

    Attributes:
        samples: those of the other data set.

    Raises:
        UserError: the tokenizer lacks one of the three tokens.
    """

    def __init__(self, samples: _Samples, config: FIMConfig, tokenizer: Tokenizer, seed: int) -> None:
        self.samples = samples
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        names = (config.prefix_token, config.suffix_token, config.middle_token)
        self._prefix, self._suffix, self._middle = (_special(tokenizer, name) for name in names)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        ids = torch.cat((sample["tokens"], sample["labels"][-1:])).numpy()
        random = np.random.default_rng((self._seed, index))
        new = self._rearranged(ids, random)[: len(ids)]
        text = torch.full((len(ids),), self._tokenizer.eod)
        text[: len(new)] = torch.from_numpy(new)
        loss_mask = sample["loss_mask"].clone()
        loss_mask[len(new) - 1 :] = 0.0
        return sample | {"tokens": text[:-1], "labels": text[1:], "loss_mask": loss_mask}

    def _rearranged(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Each document of the sample by itself; an end-of-document token stays where it is."""
        ends = np.flatnonzero(ids == self._tokenizer.eod)
        parts = []
        start = 0
        for end in [*ends.tolist(), len(ids)]:
            parts.append(self._document(ids[start:end], random))
            parts.append(ids[end : end + 1])
            start = end + 1
        return np.concatenate(parts)

    def _document(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if not len(ids) or random.random() >= self._config.rate:
            return ids
        text = self._tokenizer.detokenize(ids.tolist())
        if "\ufffd" in text:  # the row cuts a character in two: its bytes would be lost
            return ids
        first, second = sorted(random.integers(0, len(text) + 1, 2).tolist())
        prefix, middle, suffix = (
            self._tokenizer.continue_tokens(part) for part in (text[:first], text[first:second], text[second:])
        )
        if random.random() < self._config.spm_rate:
            new = [self._prefix, self._suffix, *suffix, self._middle, *prefix, *middle]
        else:
            new = [self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle]
        return np.array(new, dtype=ids.dtype)


def _special(tokenizer: Tokenizer, name: str) -> int:
    ids = tokenizer.continue_tokens(name) if isinstance(tokenizer, HuggingFaceTokenizer) else []
    if len(ids) != 1:
        raise UserError(
            f"dataset.fim: {name} is no single token of the tokenizer: name its own fill-in-the-middle tokens, or "
            f"use a tokenizer that has some"
        )
    return ids[0]
