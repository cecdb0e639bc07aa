# SPDX-License-Identifier: Apache-2.0
"""The config of mock data."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.bridge.data.dataset_config import DatasetConfig, DatasetRequest, Splits


@dataclass(kw_only=True)
class MockGPTDatasetConfig(DatasetConfig):
    """Synthetic samples that a model can learn: sequences of numbers with a constant step."""

    read_ahead: ClassVar[bool] = True

    random_seed: int = 1234
    """Seed of the samples. A sample depends on the seed, its index and its split only."""

    @property
    def shuffle_seed(self) -> int:
        return self.random_seed

    def build(self, request: DatasetRequest) -> Splits:
        """Build datasets of exactly the requested sizes."""
        from megatron.bridge.data.pretraining.mock_config import MockGPTDataset  # imports torch

        self.finalize()
        vocab_size = request.tokenizer.vocab_size
        return Splits(
            *(
                MockGPTDataset(size, self.seq_length, vocab_size, self.random_seed, split) if size else None
                for split, size in enumerate(request.sizes)
            )
        )


LARGEST_STEP = 8  # few different steps: a small model learns them within tens of optimizer steps


@dataclass(eq=False)
class MockGPTDataset(Dataset[dict[str, Any]]):
    """Sample ``i`` counts from a random start in a random small step, modulo the vocabulary size."""

    size: int
    seq_length: int
    vocab_size: int
    """All tokens are below this."""
    seed: int
    split: int = 0
    """Index of the split; no two splits share a sample."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        random = np.random.default_rng((self.seed, self.split, index))
        start, step = random.integers(self.vocab_size), random.integers(1, LARGEST_STEP + 1)
        text = torch.from_numpy((start + step * np.arange(self.seq_length + 1)) % self.vocab_size)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.arange(self.seq_length),
        }
