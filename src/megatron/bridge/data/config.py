# SPDX-License-Identifier: Apache-2.0
"""What a run trains on. Importing this module costs no torch; ``build`` does the work.

A dataset of one's own is a subclass of ``DatasetConfig``: its ``build`` returns three map-style datasets whose
samples are dicts of ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each of ``seq_length`` elements.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from megatron.bridge.data.loaders import BatchSizes, Iterators
    from megatron.bridge.data.sources import Source
    from megatron.bridge.data.tokenizer import Tokenizer

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
LOADERS = ("single", "batch", "cyclic")

Blend = tuple[list[str], list[float] | None]


def choices(values: Sequence[str]) -> str:
    """The values as a sentence has them.

    Example:
        >>> choices(["a", "b", "c"])
        'a, b or c'
    """
    return f"{', '.join(values[:-1])} or {values[-1]}"


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
        dataloader_type: ``single`` draws the dataset's own order once; ``batch`` does so too, but deals the
            samples of a global batch out one by one instead of in blocks; ``cyclic`` reshuffles it every epoch.
        data_sharding: with ``cyclic``, every data-parallel rank shuffles a part of its own (reads stay local,
            but the order then depends on the number of ranks).
        num_workers: processes that read ahead; 0 reads in the training process.
        read_ahead: whether, without ``num_workers``, a thread makes the next batch during a step. It does for the
            numbered samples of this package. A class of your own sets it if its samples depend on their number
            alone: of what draws from torch's random numbers, a thread would mix them up with those of dropout.
    """

    read_ahead: ClassVar[bool] = False

    seq_length: int
    dataloader_type: Literal["single", "batch", "cyclic"] = "single"
    data_sharding: bool = False
    num_workers: int = 0

    @property
    def masks_tokens(self) -> bool:
        """Whether some tokens are not learnt, so that samples count differently many."""
        return False

    @property
    def joins_samples(self) -> bool:
        """Whether a row may hold several samples, of which attention is told by ``cu_seqlens``."""
        return False

    @property
    @abstractmethod
    def shuffle_seed(self) -> int:
        """Seed of the order of samples."""

    @abstractmethod
    def build(self, request: DatasetRequest) -> Splits:
        """The datasets; to be called on all ranks.

        Each has at least the requested number of samples, unless ``dataloader_type`` is ``cyclic``.
        """

    def iterators(self, request: DatasetRequest, sizes: "BatchSizes", consumed: tuple[int, int]) -> "Iterators":
        """The microbatches of one data-parallel rank; to be called on all ranks.

        Args:
            request: what the run needs.
            sizes: which part of a batch this rank draws.
            consumed: samples that all ranks together drew before, for training and for validation.
        """
        from megatron.bridge.data.loaders import numbered_iterators

        return numbered_iterators(self, request, sizes, consumed)

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
        if self.dataloader_type not in LOADERS:
            found.append(
                f"dataset.dataloader_type={self.dataloader_type!r} is not known: choose {choices(LOADERS)}"
            )
        if self.data_sharding and self.dataloader_type != "cyclic":
            found.append(
                f"dataset.data_sharding=True has no effect with dataloader_type={self.dataloader_type}: "
                f"choose cyclic"
            )
        return found

    def finalize(self) -> None:
        """Check the values.

        Raises:
            UserError: with all problems.
        """
        if found := self.problems():
            raise UserError("; ".join(found))


@dataclass(kw_only=True)
class FIMConfig:
    """How documents are rearranged.

    Attributes:
        rate: share of the documents that are.
        spm_rate: share of those that begin with the suffix instead of the prefix.
        prefix_token: special token before the prefix.
        suffix_token: special token before the suffix.
        middle_token: special token before the middle.
    """

    rate: float = 0.5
    spm_rate: float = 0.5
    prefix_token: str = "<fim_prefix>"
    suffix_token: str = "<fim_suffix>"
    middle_token: str = "<fim_middle>"

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        return [
            f"dataset.fim.{name}={getattr(self, name)}: it must lie in [0, 1]"
            for name in ("rate", "spm_rate")
            if not 0 <= getattr(self, name) <= 1
        ]


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
        fim: rearrange some of the training documents, for models that fill in the middle of code.
    """

    read_ahead: ClassVar[bool] = True

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
    fim: FIMConfig | None = None

    @property
    def masks_tokens(self) -> bool:
        """Ends of documents are not learnt with ``eod_mask_loss``."""
        return self.eod_mask_loss

    @property
    def shuffle_seed(self) -> int:
        """The seed that orders documents, too."""
        return self.random_seed

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        from megatron.bridge.data.blend import blend_problems

        found = [*super().problems(), *blend_problems(self)]
        if self.fim is not None:
            found += self.fim.problems()
            masks = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
            found += [
                f"dataset.{name}=True is worked out before dataset.fim moves tokens: leave one of the two out"
                for name in masks
                if getattr(self, name)
            ]
        return found

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

    read_ahead: ClassVar[bool] = True

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
class PackedSequenceSpecs:
    """Several samples in one row.

    Attributes:
        packed_sequence_size: length of a row: ``dataset.seq_length``, or -1 for one sample a row.
        pad_seq_to_mult: each sample is filled up to a multiple of this. None takes what the layout needs: twice
            the context-parallel size, or 1.
    """

    packed_sequence_size: int = -1
    pad_seq_to_mult: int | None = None


@dataclass(kw_only=True)
class RecordDatasetConfig(DatasetConfig):
    """How records become samples, and samples rows, wherever the records come from.

    A record is a conversation (``messages`` in OpenAI's form, ``conversations`` in ShareGPT's, with ``tools``
    where there are some), ``prompt`` and ``completion`` (texts, or lists of messages), ``input`` and ``output``,
    or ``text``. Of pairs the loss is taken on the completion and the end-of-document token, of ``text`` on all of
    it, of conversations on what ``train_on`` says.

    Attributes:
        seed: seed of the training order, which changes every epoch.
        truncation: what happens to a sample of more than ``seq_length`` tokens: ``refuse`` the run, ``drop`` the
            sample, cut it off on the ``right`` or on the ``left``, or ``keep_answer``: cut what comes before the
            last answer. A sample that keeps no token to learn is dropped. All are counted and reported.
        train_on: what is learnt of a conversation: every answer of the ``assistant``, the ``last`` one, the
            ``completion`` (all answers behind the last user message), or ``everything``, prompts included. Answers
            with ``weight`` 0 are left out.
        split_turns: make a sample of each answer and what came before it. For templates that render earlier
            answers in another way than the last, as those of thinking models do.
        chat_template: file with a Jinja template, or the template itself, instead of the tokenizer's own.
        chat_template_options: values that the template reads, such as ``{"enable_thinking": False}``.
        process_example_fn: a function that turns a record into one of the forms above, or into None to leave it
            out; with two parameters it gets the tokenizer, too.
        packed_sequence_specs: several samples in one row, with attention and positions of their own.
        padding_free: join the samples of a microbatch to one row without padding.
    """

    read_ahead: ClassVar[bool] = True

    seed: int = 1234
    truncation: Literal["refuse", "drop", "right", "left", "keep_answer"] = "refuse"
    train_on: Literal["assistant", "last", "completion", "everything"] = "assistant"
    split_turns: bool = False
    chat_template: str | None = None
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    process_example_fn: Callable[..., dict[str, Any] | None] | None = None
    packed_sequence_specs: PackedSequenceSpecs | None = None
    padding_free: bool = False

    @property
    def masks_tokens(self) -> bool:
        """Prompts are not learnt."""
        return True

    @property
    def shuffle_seed(self) -> int:
        """The seed of the training order."""
        return self.seed

    @property
    def packed(self) -> bool:
        """Whether rows hold several samples."""
        return self.packed_sequence_specs is not None and self.packed_sequence_specs.packed_sequence_size > 0

    @property
    def joins_samples(self) -> bool:
        """Whether attention must be told where samples begin and end."""
        return self.packed or self.padding_free

    @property
    def sequence_multiple(self) -> int:
        """What the length of each sample in a row of several is a multiple of."""
        specs = self.packed_sequence_specs
        return (specs.pad_seq_to_mult if specs else None) or 1

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        from megatron.bridge.data.finetuning import record_problems

        return [*super().problems(), *record_problems(self)]


@dataclass(kw_only=True)
class SFTDatasetConfig(RecordDatasetConfig):
    """What data sets for fine-tuning have in common of which all samples are tokenised before the first step.

    Attributes:
        max_train_samples: use only the first records for training; the next two do the same for held-out data.
        max_validation_samples: see ``max_train_samples``.
        max_test_samples: see ``max_train_samples``.
        do_validation: False needs no validation data, and evaluates on none.
        do_test: the same for the test data.
        prepared_dir: keep tokenised samples in this folder for later runs; they are made anew when the records,
            the tokenizer, or what becomes of them changes. All machines must share it.
        workers: processes that tokenise.
    """

    max_train_samples: int | None = None
    max_validation_samples: int | None = None
    max_test_samples: int | None = None
    do_validation: bool = True
    do_test: bool = True
    prepared_dir: str | None = None
    workers: int = 1

    @abstractmethod
    def source(self, split: Split) -> "Source | None":
        """Where the records of a split come from; None if there are none."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        from megatron.bridge.data.finetuning import sft_problems

        return [*super().problems(), *sft_problems(self)]

    def build(self, request: DatasetRequest) -> Splits:
        """Rows of tokenised samples."""
        from megatron.bridge.data.finetuning import build_finetuning_datasets

        self.finalize()
        return build_finetuning_datasets(self, request)


@dataclass(kw_only=True)
class FinetuningDatasetConfig(SFTDatasetConfig):
    """Records from the files ``training``, ``validation`` and ``test`` of a folder.

    Each is a ``.jsonl``, ``.parquet`` or ``.arrow`` file, and is needed only for what the run asks for.

    Attributes:
        dataset_root: the folder.
    """

    dataset_root: str

    def check_sources(self) -> None:
        """See that the folder is there."""
        if not Path(self.dataset_root).is_dir():
            raise UserError(f"dataset.dataset_root={self.dataset_root} is not a directory: check the path")

    def source(self, split: Split) -> "Source":
        """The file of the split."""
        from megatron.bridge.data.finetuning import split_file
        from megatron.bridge.data.sources import FileSource

        return FileSource(split_file(Path(self.dataset_root), split))


@dataclass(kw_only=True)
class BlendedDatasetConfig(DatasetConfig):
    """Several data sets for fine-tuning at once.

    Attributes:
        datasets: what is blended; all with the ``seq_length`` of the blend, and packed alike.
        weights: shares of rows: of samples, or of packed rows and so of tokens.
    """

    read_ahead: ClassVar[bool] = True

    datasets: list[SFTDatasetConfig]
    weights: list[float]

    @property
    def masks_tokens(self) -> bool:
        """Prompts are not learnt."""
        return True

    @property
    def shuffle_seed(self) -> int:
        """That of the first one."""
        return self.datasets[0].shuffle_seed if self.datasets else 0

    @property
    def packed(self) -> bool:
        """Whether rows hold several samples."""
        return any(dataset.packed for dataset in self.datasets)

    @property
    def joins_samples(self) -> bool:
        """Whether attention must be told where samples begin and end."""
        return any(dataset.joins_samples for dataset in self.datasets)

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        from megatron.bridge.data.finetuning import blend_problems

        return [*super().problems(), *blend_problems(self)]

    def check_sources(self) -> None:
        """Look at those of all parts."""
        for dataset in self.datasets:
            dataset.check_sources()

    def build(self, request: DatasetRequest) -> Splits:
        """Rows of all parts in turn."""
        from megatron.bridge.data.finetuning import build_blended_datasets

        self.finalize()
        return build_blended_datasets(self, request)
