# SPDX-License-Identifier: Apache-2.0
"""From a dataset config to iterators over microbatches, positioned where the run stands."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.bridge.data.blend import get_blend_and_blend_per_split
from megatron.bridge.data.config import SPLITS, DatasetConfig, DatasetRequest, Splits
from megatron.bridge.data.samplers import (
    MegatronPretrainingBatchSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.bridge.data.tokenizer import Tokenizer
from megatron.bridge.utils.ahead import OneAhead
from megatron.bridge.utils.errors import UserError

__all__ = ["BatchIterator", "Iterators", "build_iterators", "get_blend_and_blend_per_split"]

Batch = dict[str, Any]
Sampler = MegatronPretrainingSampler | MegatronPretrainingBatchSampler | MegatronPretrainingRandomSampler
KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class BatchIterator:
    """Microbatches of one data-parallel rank, of numbered samples.

    A batch has ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (fp32), each
    [micro_batch_size, seq_length], and ``attention_mask``: None for plain causal attention, else bool
    [micro_batch_size, 1, seq_length, seq_length], True where attention is forbidden. Where rows hold several
    samples, all of a microbatch are one row, [1, length], and two more keys say where they are: ``cu_seqlens``
    (int32, where each begins, and the end of the last) and ``max_seqlen`` (int, the longest).

    Args:
        dataset: what is drawn from.
        make_sampler: says which samples, from the first batch on.
        num_workers: processes that read samples.
        read_ahead: a thread makes the next batch while this one is used; with workers it always does. Drawing from
            a ``dataset`` must then touch nothing that the training uses, such as torch's random numbers.

    Attributes:
        sample_ids: numbers of the samples in the last batch.
        dataset: what is drawn from.
    """

    def __init__(
        self,
        dataset: Any,
        make_sampler: Callable[[], Sampler],
        num_workers: int = 0,
        read_ahead: bool = False,
    ) -> None:
        self.sample_ids: list[int] = []
        self.dataset = dataset
        self._make_sampler = make_sampler
        self._num_workers = num_workers
        self._read_ahead = read_ahead
        self._batches: Iterator[tuple[list[int], Batch]] | None = None

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        self.sample_ids, batch = next(self._batches)
        return batch

    def replicate(self) -> "BatchIterator":
        """Another iterator over the same batches, from the first one: each virtual stage draws for itself."""
        return BatchIterator(self.dataset, self._make_sampler, self._num_workers, self._read_ahead)

    def _start(self) -> Iterator[tuple[list[int], Batch]]:
        if self._num_workers:
            batches: Any = iter(self._loader())  # its processes start here, not in the thread
            return OneAhead(batches)
        numbered = _Numbered(self.dataset)
        batches = (collate([numbered[index] for index in ids]) for ids in self._make_sampler())
        return OneAhead(map(_pinned, batches)) if self._read_ahead else batches

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            _Numbered(self.dataset),
            batch_sampler=self._make_sampler(),  # pyright: ignore[reportArgumentType] - any iterable of lists
            num_workers=self._num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else each loader draws a seed from the run's own random numbers
        )


class _Numbered(Dataset[tuple[int, Batch]]):
    """Samples with their numbers."""

    def __init__(self, dataset: Dataset[Batch]) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Batch]:
        return index, self._dataset[index]


def collate(samples: list[tuple[int, Batch]]) -> tuple[list[int], Batch]:
    """Sample numbers and one batch; a key that is not ours (``dataset_id`` of a blend) is left out."""
    if "cu_seqlens" in samples[0][1]:
        return [number for number, _ in samples], _one_row([sample for _, sample in samples])
    batch: Batch = {key: torch.stack([sample[key] for _, sample in samples]) for key in KEYS}
    masks = [sample.get("attention_mask") for _, sample in samples]
    batch["attention_mask"] = None if masks[0] is None else default_collate(masks)
    return [number for number, _ in samples], batch


def _pinned(drawn: tuple[list[int], Batch]) -> tuple[list[int], Batch]:
    """The batch where a GPU can copy it from while the training goes on."""
    if not torch.cuda.is_available():
        return drawn
    numbers, batch = drawn
    return numbers, {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def _one_row(rows: list[Batch]) -> Batch:
    """Rows of several samples one behind the other."""
    batch: Batch = {key: torch.cat([row[key] for row in rows])[None] for key in KEYS}
    lengths = np.concatenate([np.diff(row["cu_seqlens"].numpy()) for row in rows])
    bounds = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
    # the longest as it is: with the length of the row, Megatron-Core would count positions on through all samples
    return batch | {
        "attention_mask": None,
        "cu_seqlens": torch.from_numpy(bounds),
        "max_seqlen": int(lengths.max()),
    }


class Batches(Protocol):
    """Microbatches of one data-parallel rank, of numbered samples (``BatchIterator``) or of a stream.

    Attributes:
        sample_ids: places of the samples of the last batch in the order of the run.
    """

    sample_ids: list[int]

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def replicate(self) -> "Batches":
        """Another iterator over the same microbatches, from the first one."""
        ...


class Iterators(NamedTuple):
    """One iterator for each purpose; None where no samples were asked for."""

    train: Batches | None
    valid: Batches | None
    test: Batches | None


def build_iterators(
    dataset_config: DatasetConfig,
    tokenizer: Tokenizer,
    sizes: tuple[int, int, int],
    micro_batch_size: int,
    global_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    consumed_train: int = 0,
    consumed_valid: int = 0,
) -> Iterators:
    """Iterators over the microbatches of one data-parallel rank; to be called on all ranks.

    Global batch ``k`` is the samples ``[k * global_batch_size, (k + 1) * global_batch_size)`` in every layout.

    Args:
        dataset_config: what to read.
        tokenizer: the tokenizer of the run.
        sizes: samples for training, for all evaluations of the run, and for the test.
        micro_batch_size: samples that a rank draws at a time.
        global_batch_size: samples of one optimizer step.
        dp_rank: this data-parallel rank.
        dp_size: number of data-parallel ranks.
        consumed_train: training samples that all ranks together drew before.
        consumed_valid: the same for validation.

    Raises:
        UserError: the data is missing, damaged or too small.
    """
    assert global_batch_size % (micro_batch_size * dp_size) == 0, (global_batch_size, micro_batch_size, dp_size)
    request = DatasetRequest(sizes, tokenizer)
    batch_sizes = BatchSizes(micro_batch_size, global_batch_size, dp_rank, dp_size)
    return dataset_config.iterators(request, batch_sizes, (consumed_train, consumed_valid))


def numbered_iterators(
    config: DatasetConfig, request: DatasetRequest, sizes: "BatchSizes", consumed: tuple[int, int]
) -> Iterators:
    """Iterators over datasets whose samples have numbers: ``DatasetConfig.iterators`` of most configs."""
    splits: Splits = config.build(request)

    def iterator(name: str, size: int, dataset: Any, consumed: int) -> BatchIterator | None:
        if dataset is None:
            return None
        _check_enough(name, len(dataset), sizes.whole)
        if config.dataloader_type != "cyclic":
            _check_all(name, len(dataset), size)
        return iterate(dataset, config, sizes, consumed)

    return Iterators(*map(iterator, SPLITS, request.sizes, splits, (*consumed, 0)))


class BatchSizes(NamedTuple):
    """Which part of a batch a data-parallel rank draws.

    Attributes:
        micro: samples that a rank draws at a time.
        whole: samples of one optimizer step.
        rank: this data-parallel rank.
        ranks: number of data-parallel ranks.
    """

    micro: int
    whole: int
    rank: int
    ranks: int


def iterate(
    dataset: Any, config: DatasetConfig, sizes: BatchSizes, consumed: int = 0, ahead: bool = True
) -> BatchIterator:
    """The microbatches of a data-parallel rank, behind the first ``consumed`` samples of all ranks.

    Whether they are made ahead, ``config`` says, unless not ``ahead``: for a look at a few.
    """
    common = (len(dataset), consumed, sizes.micro, sizes.rank, sizes.ranks)

    def make_sampler() -> Sampler:
        if config.dataloader_type == "single":
            return MegatronPretrainingSampler(*common)
        if config.dataloader_type == "batch":
            return MegatronPretrainingBatchSampler(
                len(dataset), consumed, sizes.micro, sizes.whole, sizes.rank, sizes.ranks
            )
        return MegatronPretrainingRandomSampler(
            dataset,
            *common,
            data_sharding=config.data_sharding,
            seed=config.shuffle_seed,
            global_batch_size=sizes.whole,
        )

    return BatchIterator(dataset, make_sampler, config.num_workers * ahead, config.read_ahead and ahead)


def _check_enough(name: str, length: int, global_batch_size: int) -> None:
    if length < global_batch_size:
        raise UserError(
            f"the {name} data has {length} samples, less than train.global_batch_size={global_batch_size}: use a "
            f"smaller batch, or more data"
        )


def _check_all(name: str, length: int, wanted: int) -> None:
    """Data that is drawn once would end in the middle of the run."""
    if length < wanted:
        raise UserError(
            f"the run needs {wanted} samples for {name}, but the data has {length}: train for fewer steps, set "
            f"dataset.dataloader_type=cyclic, or give a blend weights, which repeats its corpora"
        )
