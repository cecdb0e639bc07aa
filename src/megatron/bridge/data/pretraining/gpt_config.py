# SPDX-License-Identifier: Apache-2.0
"""The configs of indexed datasets, and of mock data."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from megatron.bridge.data.dataset_config import SPLITS, DatasetConfig, DatasetRequest, Splits
from megatron.bridge.data.pretraining.blend import (
    Blend,
    BlendPerSplit,
    blend_problems,
    split_problems,
)
from megatron.bridge.utils.config.ranges import SEED
from megatron.bridge.utils.errors import UserError


@dataclass(kw_only=True)
class FIMConfig:
    """Fill in the middle: how training documents are rearranged."""

    rate: float = 0.5
    """Share of the documents that are rearranged."""
    spm_rate: float = 0.5
    """Share of the rearranged documents that begin with the suffix instead of the prefix."""
    prefix_token: str = "<fim_prefix>"
    """Special token before the prefix."""
    suffix_token: str = "<fim_suffix>"
    """Special token before the suffix."""
    middle_token: str = "<fim_middle>"
    """Special token before the middle."""

    def problems(self) -> list[str]:
        return [
            f"dataset.fim.{name}={getattr(self, name)}: it must be between 0 and 1"
            for name in ("rate", "spm_rate")
            if not 0 <= getattr(self, name) <= 1
        ]


@dataclass(kw_only=True)
class GPTDatasetConfig(DatasetConfig):
    """Documents in Megatron-Core's indexed format, divided into samples of ``seq_length`` tokens."""

    read_ahead: ClassVar[bool] = True

    blend: Blend | None = None
    """Path prefixes (without ``.bin`` or ``.idx``) and their weights. Without weights (None), each corpus is used
    once, in proportion to its size. ``split`` divides the documents among the splits."""
    blend_per_split: BlendPerSplit | None = None
    """One blend each for training, validation and testing, instead of ``blend`` and ``split``."""
    split: str | None = None
    """Shares of the documents for training, validation and testing, such as ``969,30,1``."""
    path_to_cache: str | None = None
    """Directory of the sample indices, shared by all nodes. None puts them next to each corpus."""
    random_seed: Annotated[int, SEED] = 1234
    """Seed of the order of documents and samples."""
    reset_position_ids: bool = False
    """Restart the position ids after each end-of-document token."""
    reset_attention_mask: bool = False
    """Prevent attention across documents within a sample. This builds full attention masks."""
    eod_mask_loss: bool = False
    """Leave positions whose input is an end-of-document token out of the loss."""
    mmap_bin_files: bool = True
    """Memory-map the ``.bin`` files instead of reading them."""
    num_dataset_builder_threads: int = 1
    """Number of threads that build the indices of a blend."""
    mid_level_dataset_surplus: float = 0.005
    """Share of surplus samples that each corpus of a blend prepares."""
    fim: FIMConfig | None = None
    """Rearrange some training documents, for models that fill in the middle of code."""

    @property
    def masks_tokens(self) -> bool:
        return self.eod_mask_loss

    @property
    def shuffle_seed(self) -> int:
        return self.random_seed

    def problems(self) -> list[str]:
        problems = [*super().problems(), *self._blend_problems()]
        if self.fim is not None:
            masks = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
            problems += self.fim.problems()
            problems += [
                f"dataset.{name}=True is computed before dataset.fim moves tokens: remove one of the two"
                for name in masks
                if getattr(self, name)
            ]
        return problems

    def _blend_problems(self) -> list[str]:
        if self.blend is None and self.blend_per_split is None:
            return [
                "dataset.blend is not set: name a corpus, or use MockGPTDatasetConfig for synthetic data"
            ]
        if self.blend_per_split is not None:
            return self._per_split_problems(self.blend_per_split)
        return [*blend_problems("dataset.blend", self.blend), *split_problems(self.split)]

    def _per_split_problems(self, blends: BlendPerSplit) -> list[str]:
        problems = []
        if self.blend is not None:
            problems.append(
                "dataset.blend and dataset.blend_per_split are both set: remove one of them"
            )
        if self.split is not None:
            problems.append(
                f"dataset.split={self.split!r} has no effect with dataset.blend_per_split: remove it"
            )
        if len(blends) != len(SPLITS):
            return [
                *problems,
                f"dataset.blend_per_split has {len(blends)} entries: give three (train, valid, test)",
            ]
        for name, blend in zip(SPLITS, blends, strict=True):
            problems += blend_problems(f"dataset.blend_per_split ({name})", blend)
        return problems

    def held_out_from(self, source: str) -> "GPTDatasetConfig":
        """Return a config that validates on all documents of the corpus with the prefix ``source``."""
        per_split: BlendPerSplit = (None, ([source], None), None)
        return replace(self, blend=None, split=None, blend_per_split=per_split)

    def check_sources(self) -> None:
        from megatron.bridge.data.pretraining.gpt_builder import open_corpus  # imports torch

        for blend in (self.blend, *(self.blend_per_split or ())):
            for prefix in blend[0] if blend is not None else ():
                open_corpus(prefix)

    def build(self, request: DatasetRequest) -> Splits:
        from megatron.bridge.data.pretraining.gpt_builder import build_gpt_datasets  # imports torch

        self.finalize()
        return build_gpt_datasets(self, request)


@dataclass(kw_only=True)
class MockGPTDatasetConfig(DatasetConfig):
    """Synthetic samples that a model can learn: sequences of numbers with a constant step."""

    read_ahead: ClassVar[bool] = True

    random_seed: Annotated[int, SEED] = 1234
    """Seed of the samples. A sample depends only on the seed, its index and its split."""

    @property
    def shuffle_seed(self) -> int:
        return self.random_seed

    def held_out_from(self, source: str) -> "MockGPTDatasetConfig":
        """Return a config that validates on the samples of another seed, the number ``source``."""
        if not source.isdecimal():
            raise UserError(
                f"validation.sets reads {source}, but mock data has no sources: give a number, which is a seed"
            )
        return replace(self, random_seed=int(source))

    def build(self, request: DatasetRequest) -> Splits:
        from megatron.bridge.data.pretraining.mock_dataset import MockGPTDataset  # imports torch

        self.finalize()
        vocab_size = request.tokenizer.vocab_size
        return Splits(
            *(
                MockGPTDataset(size, self.seq_length, vocab_size, self.random_seed, split)
                if size
                else None
                for split, size in enumerate(request.sizes)
            )
        )
