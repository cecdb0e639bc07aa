# SPDX-License-Identifier: Apache-2.0
"""What a run trains on. Importing this module costs no torch; ``build`` does the work.

A dataset of one's own is a subclass of ``DatasetConfig``: its ``build`` returns three map-style datasets whose
samples are dicts of ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each of ``seq_length`` elements.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from megatron.bridge.data.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")

Blend = tuple[list[str], list[float] | None]


@dataclass(frozen=True)
class DatasetRequest:
    """What a run needs of its data.

    Attributes:
        sizes: samples to train on, to validate on (over the whole run) and to test on; 0 builds no dataset.
        tokenizer: the tokenizer of the run.
    """

    sizes: tuple[int, int, int]
    tokenizer: "Tokenizer"


class Splits(NamedTuple):
    """One dataset for each purpose; None where nothing was asked for."""

    train: "Dataset[dict[str, Any]] | None"
    valid: "Dataset[dict[str, Any]] | None"
    test: "Dataset[dict[str, Any]] | None"


@dataclass(kw_only=True)
class DatasetConfig(ABC):
    """What all datasets have in common.

    Attributes:
        seq_length: tokens in a sample.
        dataloader_type: ``single`` draws the dataset's own order once; ``cyclic`` reshuffles it every epoch.
        data_sharding: with ``cyclic``, every data-parallel rank shuffles a part of its own (reads stay local,
            but the order then depends on the number of ranks).
        num_workers: processes that read ahead; 0 reads in the training process.
    """

    seq_length: int
    dataloader_type: Literal["single", "cyclic"] = "single"
    data_sharding: bool = False
    num_workers: int = 0

    @property
    @abstractmethod
    def shuffle_seed(self) -> int:
        """Seed of the order of samples."""

    @abstractmethod
    def build(self, request: DatasetRequest) -> Splits:
        """The datasets; to be called on all ranks.

        Each has at least the requested number of samples, unless ``dataloader_type`` is ``cyclic``.
        """

    def check_sources(self) -> None:  # noqa: B027 - made-up data has no files
        """Look at the files, so that a wrong path is told before a model is built.

        Raises:
            UserError: a file is missing or damaged.
        """

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        found = []
        if self.seq_length < 1:
            found.append(f"dataset.seq_length={self.seq_length}: it must be at least 1")
        if self.num_workers < 0:
            found.append(f"dataset.num_workers={self.num_workers}: it cannot be negative")
        if self.dataloader_type not in ("single", "cyclic"):
            found.append(f"dataset.dataloader_type={self.dataloader_type!r} is not known: choose single or cyclic")
        if self.data_sharding and self.dataloader_type == "single":
            found.append("dataset.data_sharding=True has no effect with dataloader_type=single: choose cyclic")
        return found

    def finalize(self) -> None:
        """Check the values.

        Raises:
            UserError: with all problems.
        """
        if found := self.problems():
            raise UserError("; ".join(found))


@dataclass(kw_only=True)
class GPTDatasetConfig(DatasetConfig):
    """Documents in Megatron-Core's indexed format, cut into samples of ``seq_length`` tokens.

    Attributes:
        blend: path prefixes (without ``.bin``/``.idx``) and their weights. None instead of weights takes each
            corpus once, in proportion to its size. ``split`` says which part of it serves which purpose.
        blend_per_split: three blends, for training, validation and test, instead of ``blend`` and ``split``.
        split: shares of the documents for training, validation and test.
        path_to_cache: directory for the sample indices, shared by all machines; by default beside each corpus.
        random_seed: seed of the order of documents and samples.
        reset_position_ids: positions start again after each end of document.
        reset_attention_mask: tokens do not attend to earlier documents of their sample (builds full masks).
        eod_mask_loss: no loss where the input is an end of document.
        mmap_bin_files: map the token files instead of reading from them.
        num_dataset_builder_threads: threads that build the indices of a blend.
        mid_level_dataset_surplus: share of samples that each corpus of a blend prepares in reserve.
    """

    blend: Blend | None = None
    blend_per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None
    split: str | None = None
    path_to_cache: str | None = None
    random_seed: int = 1234
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    mmap_bin_files: bool = True
    num_dataset_builder_threads: int = 1
    mid_level_dataset_surplus: float = 0.005

    @property
    def shuffle_seed(self) -> int:
        """The seed that orders documents, too."""
        return self.random_seed

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        from megatron.bridge.data.blend import blend_problems

        return super().problems() + blend_problems(self)

    def check_sources(self) -> None:
        """Open every corpus."""
        from megatron.bridge.data.gpt import open_corpus

        for blend in (self.blend, *(self.blend_per_split or ())):
            for prefix in blend[0] if blend is not None else ():
                open_corpus(prefix)

    def build(self, request: DatasetRequest) -> Splits:
        """Megatron-Core's GPT datasets, blended."""
        from megatron.bridge.data.gpt import build_gpt_datasets

        self.finalize()
        return build_gpt_datasets(self, request)


@dataclass(kw_only=True)
class MockGPTDatasetConfig(DatasetConfig):
    """Made-up samples that a model can learn: runs of numbers with a constant step.

    Attributes:
        random_seed: a sample depends on this, its number and its split, on nothing else.
    """

    random_seed: int = 1234

    @property
    def shuffle_seed(self) -> int:
        """The seed of the samples, too."""
        return self.random_seed

    def build(self, request: DatasetRequest) -> Splits:
        """Datasets of exactly the requested sizes."""
        from megatron.bridge.data.mock import MockGPTDataset

        self.finalize()
        vocab_size = request.tokenizer.vocab_size
        return Splits(
            *(
                MockGPTDataset(size, self.seq_length, vocab_size, self.random_seed, number) if size else None
                for number, size in enumerate(request.sizes)
            )
        )


@dataclass(kw_only=True)
class FinetuningDatasetConfig(DatasetConfig):
    """Prompts and their completions from ``training.jsonl``, ``validation.jsonl`` and ``test.jsonl``.

    A line is an object with ``prompt`` and ``completion``, or ``input`` and ``output`` (the loss is taken on the
    completion and the end-of-document token only), or ``text`` (the loss is taken on all of it).

    Attributes:
        dataset_root: directory of the three files; a file is needed only for what the run asks for.
        seed: seed of the training order, which changes every epoch.
        truncation: what happens to a sample of more than ``seq_length`` tokens: ``refuse`` the run, ``drop`` the
            sample, or cut it off on the ``right``. A sample that keeps no token to learn is dropped. All are
            counted and reported.
    """

    dataset_root: str
    seed: int = 1234
    truncation: Literal["refuse", "drop", "right"] = "refuse"

    @property
    def shuffle_seed(self) -> int:
        """The seed of the training order."""
        return self.seed

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        found = super().problems()
        if self.truncation not in ("refuse", "drop", "right"):
            found.append(f"dataset.truncation={self.truncation!r} is not known: choose refuse, drop or right")
        return found

    def check_sources(self) -> None:
        """See that the directory is there."""
        if not Path(self.dataset_root).is_dir():
            raise UserError(f"dataset.dataset_root={self.dataset_root} is not a directory: check the path")

    def build(self, request: DatasetRequest) -> Splits:
        """Tokenised samples, padded to ``seq_length``."""
        from megatron.bridge.data.finetuning import build_finetuning_datasets

        self.finalize()
        return build_finetuning_datasets(self, request)
