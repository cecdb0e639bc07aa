# SPDX-License-Identifier: Apache-2.0
"""Made-up samples: deterministic by number, independent of how many ranks draw them."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

LONGEST_STEP = 8  # few different steps: a small model learns them within tens of optimizer steps


class MockGPTDataset(Dataset[dict[str, Any]]):
    """Sample ``i`` counts from a random start in a random small step, modulo the vocabulary.

    Args:
        size: number of samples.
        seq_length: tokens in a sample.
        vocab_size: tokens are below this.
        seed: same seed, same samples.
        split: number of the split, so that no two splits share a sample.
    """

    def __init__(self, size: int, seq_length: int, vocab_size: int, seed: int, split: int = 0) -> None:
        self.size = size
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.seed = seed
        self.split = split

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        random = np.random.default_rng((self.seed, self.split, index))
        start, step = random.integers(self.vocab_size), random.integers(1, LONGEST_STEP + 1)
        text = torch.from_numpy((start + step * np.arange(self.seq_length + 1)) % self.vocab_size)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.arange(self.seq_length),
        }
