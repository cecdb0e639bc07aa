# SPDX-License-Identifier: Apache-2.0
"""Fill in the middle: some documents are cut into three pieces, which are put in another order.

From such documents a model learns to complete code at a cursor (Bavarian et al. 2022, "Efficient Training of
Language Models to Fill in the Middle"). The cuts fall between characters, not tokens, because a cursor may be
anywhere.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.pretraining.gpt_config import FIMConfig


class FIMDataset(Dataset[dict[str, Any]]):
    """The samples of another dataset, with some of their documents rearranged.

    A sample depends on its index and the seed only, and keeps its length. The three added tokens push others out
    at the end. Characters may also become fewer tokens than before; the sample then ends in end-of-document tokens
    that are left out of the loss.
    """

    def __init__(self, dataset: Any, config: "FIMConfig", tokenizer: Tokenizer, seed: int) -> None:
        self.dataset = dataset
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        names = (config.prefix_token, config.suffix_token, config.middle_token)
        self._prefix, self._suffix, self._middle = (_special_token(tokenizer, name) for name in names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.dataset[index]
        ids = torch.cat((sample["tokens"], sample["labels"][-1:])).numpy()
        random = np.random.default_rng((self._seed, index))
        new = self._rearrange(ids, random)[: len(ids)]
        text = torch.full((len(ids),), self._tokenizer.eod)
        text[: len(new)] = torch.from_numpy(new)
        loss_mask = sample["loss_mask"].clone()
        loss_mask[len(new) - 1 :] = 0.0
        return sample | {"tokens": text[:-1], "labels": text[1:], "loss_mask": loss_mask}

    def _rearrange(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Rearrange each document of the sample by itself; end-of-document tokens stay where they are."""
        ends = np.flatnonzero(ids == self._tokenizer.eod)
        parts = []
        start = 0
        for end in [*ends.tolist(), len(ids)]:
            parts.append(self._rearrange_document(ids[start:end], random))
            parts.append(ids[end : end + 1])
            start = end + 1
        return np.concatenate(parts)

    def _rearrange_document(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if not len(ids) or random.random() >= self._config.rate:
            return ids
        text = self._tokenizer.detokenize(ids.tolist())
        if "\ufffd" in text:  # the sample cuts a character in two: its bytes would be lost
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


def _special_token(tokenizer: Tokenizer, name: str) -> int:
    ids = tokenizer.continue_tokens(name) if isinstance(tokenizer, HuggingFaceTokenizer) else []
    if len(ids) != 1:
        raise UserError(
            f"dataset.fim: {name} is not a single token of the tokenizer: name the tokenizer's own "
            f"fill-in-the-middle tokens, or use a tokenizer that has some"
        )
    return ids[0]
