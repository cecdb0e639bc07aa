# SPDX-License-Identifier: Apache-2.0
"""The config of mock data."""

from dataclasses import dataclass
from typing import ClassVar

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
        from megatron.bridge.data.pretraining.mock_dataset import MockGPTDataset  # imports torch

        self.finalize()
        vocab_size = request.tokenizer.vocab_size
        return Splits(
            *(
                MockGPTDataset(size, self.seq_length, vocab_size, self.random_seed, split) if size else None
                for split, size in enumerate(request.sizes)
            )
        )
