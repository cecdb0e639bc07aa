# SPDX-License-Identifier: Apache-2.0
"""Synthetic samples."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

LARGEST_STEP = 8  # few different steps: a small model learns them within tens of optimizer steps


@dataclass(eq=False)
class MockGPTDataset(Dataset[dict[str, Any]]):
    """Sample ``i`` counts from a random start by a small random step, modulo the vocabulary size."""

    size: int
    seq_length: int
    vocab_size: int  # all tokens are below this
    seed: int
    split: int = 0  # index of the split; no two splits share a sample

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        random = np.random.default_rng((self.seed, self.split, index))
        start = random.integers(self.vocab_size)
        step = random.integers(1, LARGEST_STEP + 1)
        text = torch.from_numpy((start + step * np.arange(self.seq_length + 1)) % self.vocab_size)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.arange(self.seq_length),
        }
