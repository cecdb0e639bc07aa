# SPDX-License-Identifier: Apache-2.0
"""What all dataset configs have in common.

To add your own dataset, subclass ``DatasetConfig``. Its ``build`` returns three map-style datasets whose
samples are dicts with ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each of length ``seq_length``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from megatron.bridge.utils.config.ranges import WORKERS
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from megatron.bridge.data.loaders import BatchShard, Iterators
    from megatron.bridge.data.tokenizer import Tokenizer

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
DataloaderType = Literal["single", "batch", "cyclic"]


@dataclass(frozen=True)
class DatasetRequest:
    """What a run needs from its data."""

    sizes: tuple[int, int, int]
    """Number of samples for training, for all validation runs together, and for testing. 0 builds no dataset."""
    tokenizer: "Tokenizer"
    image_share: tuple[int, int] | None = (0, 1)
    """This rank, and the number of ranks that share out the images of a batch: it decodes its own. None for batches
    without pixels, which only the first pipeline stage needs."""


class Splits(NamedTuple):
    """One dataset for each split; None where no samples were requested."""

    train: "Dataset[dict[str, Any]] | None"
    valid: "Dataset[dict[str, Any]] | None"
    test: "Dataset[dict[str, Any]] | None"


@dataclass(kw_only=True)
class DatasetConfig(ABC):
    """The base class of all dataset configs."""

    read_ahead: ClassVar[bool] = False
    """Whether a thread makes the next batch during a step when ``num_workers`` is 0.

    Set it in your own class if a sample depends on its index alone. If making a sample draws from torch's
    random number generator, leave it False: the thread would compete with dropout for random numbers.
    """

    has_epochs: ClassVar[bool] = False
    """Whether ``count_rows`` can count the rows of an epoch, for ``train.num_epochs``."""

    masks_tokens: ClassVar[bool] = False
    """Whether some tokens are left out of the loss, so that samples contribute unequal numbers of tokens."""

    seq_length: int
    """Number of tokens in a sample."""
    dataloader_type: DataloaderType = "single"
    """``single`` draws the samples once, in the dataset's own order. ``batch`` draws the same global batches, but
    deals their samples out to the ranks one by one instead of in blocks. ``cyclic`` reshuffles every epoch."""
    data_sharding: bool = False
    """With ``cyclic``, each data-parallel rank shuffles its own part of the dataset. Reads stay local, but the
    order then depends on the number of ranks."""
    num_workers: Annotated[int, WORKERS] = 0
    """Number of worker processes that load data; 0 loads it in the training process."""

    @property
    def joins_samples(self) -> bool:
        """Whether a row may hold several samples, separated by ``cu_seqlens``."""
        return False

    @property
    @abstractmethod
    def shuffle_seed(self) -> int:
        """The seed of the sample order."""

    @abstractmethod
    def build(self, request: DatasetRequest) -> Splits:
        """Build the datasets. All ranks must call this.

        Each dataset has at least the requested number of samples, unless ``dataloader_type`` is ``cyclic``.
        """

    def count_rows(self, tokenizer: "Tokenizer") -> int:
        """The number of training rows of an epoch. All ranks must call this; it needs ``has_epochs``."""
        raise NotImplementedError(f"{type(self).__name__} has no epochs")

    def held_out_from(self, source: str) -> "DatasetConfig":
        """Return a config whose validation split is all of ``source``, for ``validation.sets``.

        Raises:
            UserError: This kind of dataset has no other sources.
        """
        raise UserError(
            f"validation.sets reads {source}, which a dataset of type {type(self).__name__} cannot: use "
            "GPTDatasetConfig, FinetuningDatasetConfig or HFDatasetConfig, or null for its own validation split"
        )

    def check_sources(self) -> None:  # noqa: B027 - mock data has no files
        """Check the data files, so that a wrong path is reported before the model is built."""

    def problems(self) -> list[str]:
        """Everything that is wrong with the values, as one sentence each."""
        problems = [
            *too_small(self, "seq_length"),
            *unknown(self, "dataloader_type", get_args(DataloaderType)),
        ]
        if self.num_workers < 0:
            problems.append(f"dataset.num_workers={self.num_workers}: it cannot be negative")
        if self.data_sharding and self.dataloader_type != "cyclic":
            problems.append(
                f"dataset.data_sharding=True has no effect with dataset.dataloader_type={self.dataloader_type}: "
                f"set dataset.dataloader_type=cyclic"
            )
        return problems

    def finalize(self) -> None:
        """Check the values; one error has all problems."""
        if problems := self.problems():
            raise UserError("; ".join(problems))


@dataclass(kw_only=True)
class StreamingDatasetConfig(DatasetConfig):
    """A dataset that can only be read from beginning to end: its samples have no indices."""

    @abstractmethod
    def iterators(
        self, request: DatasetRequest, shard: "BatchShard", consumed: tuple[int, int]
    ) -> "Iterators":
        """The microbatches of one data-parallel rank. All ranks must call this.

        Args:
            request: what the run needs.
            shard: the part of each batch that this rank draws.
            consumed: samples that all ranks together have already drawn, for training and for validation.
        """

    def build(self, request: DatasetRequest) -> Splits:
        """Refused: there is no map-style dataset."""
        raise UserError(
            f"dataset={type(self).__name__} is a stream, so its samples have no indices: call "
            f"megatron.bridge.data.loaders.build_iterators instead of build"
        )


def too_small(config: object, *names: str) -> Iterator[str]:
    """A sentence for each of the fields ``names`` that is set to less than 1."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            yield f"dataset.{name}={value}: it must be at least 1"


def unknown(config: object, name: str, known: Sequence[str]) -> Iterator[str]:
    """A sentence if the field ``name`` has none of the ``known`` values."""
    if (value := getattr(config, name)) not in known:
        yield f"dataset.{name}={value!r} is unknown: choose {', '.join(known[:-1])} or {known[-1]}"
