# SPDX-License-Identifier: Apache-2.0
"""From a dataset config to iterators over microbatches, at any position of a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.bridge.data.dataset_config import (
    SPLITS,
    DatasetConfig,
    DatasetRequest,
    Splits,
    StreamingDatasetConfig,
)
from megatron.bridge.data.finetuning.context_plan import ContextSharing
from megatron.bridge.data.finetuning.planned_steps import PlannedSteps
from megatron.bridge.data.media.processing import join_media
from megatron.bridge.data.pretraining.blend import get_blend_and_blend_per_split
from megatron.bridge.data.samplers import (
    BalancedSampler,
    MegatronPretrainingBatchSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.bridge.data.tokenizer import Tokenizer
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import lazy_names
from megatron.bridge.utils.prefetch import PrefetchIterator

__all__ = [
    "BatchIterator",
    "DataIterator",
    "Iterators",
    "build_iterators",
    "get_blend_and_blend_per_split",
]

Batch = dict[str, Any]
LocatedSample = tuple[int, Batch]  # the index of a sample, and the sample
Sampler = (
    MegatronPretrainingSampler | MegatronPretrainingBatchSampler | MegatronPretrainingRandomSampler
)
BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
OPTIONAL_KEYS = (
    "padding_mask",
    "desirable",  # of ``LabeledRows``
    "relevance",  # of ``RelevanceRows``
)


class DataIterator(Protocol):
    """The microbatches of one data-parallel rank: a ``BatchIterator`` or a ``StreamingBatchIterator``.

    A batch has ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (fp32), each of shape
    [micro_batch_size, seq_length]. Its ``attention_mask`` is None for causal attention, or bool of shape
    [micro_batch_size, 1, seq_length, seq_length], True where attention is masked. If rows hold several samples,
    the rows of a microbatch are concatenated to [1, length], and there are two more keys: ``cu_seqlens`` (int32,
    the start of each sample and the end of the last) and ``max_seqlen`` (int, the length of the longest). Where rows
    are padded, ``padding_mask`` (bool) is True for padding, which routers of experts do not count.

    Of a vision-language model, ``media`` holds the tensors of all images in the order of their tokens (empty without
    images, absent where no pixels are asked for), and ``position_ids`` may be [3, micro_batch_size, seq_length].
    """

    sample_ids: list[int]  # the positions of the samples of the last batch in the order of the run

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def replicate(self) -> "DataIterator":
        """Another iterator over the same microbatches, from the first one."""
        ...


class Iterators(NamedTuple):
    """One iterator for each split; None where no samples were requested."""

    train: DataIterator | None
    valid: DataIterator | None
    test: DataIterator | None
    valid_sets: Mapping[str, DataIterator] = MappingProxyType({})
    """The sets of ``validation.sets`` by name, instead of ``valid``."""


@dataclass(eq=False)
class BatchIterator:
    """A ``DataIterator`` over a map-style dataset."""

    dataset: Any
    make_sampler: Callable[[], Iterable[Any]]  # makes a sampler that starts at the first batch
    num_workers: int = 0  # number of worker processes that load samples
    read_ahead: bool = False
    """Without workers, a thread makes the next batch while this one is used. The dataset must then not use anything
    that the training uses, such as torch's random number generator."""
    vocab_size: int | None = None  # of the model, whose ids are below it; None checks none
    sample_ids: list[int] = field(default_factory=list[int], init=False)
    _batches: Iterator[tuple[list[int], Batch]] | None = field(default=None, init=False)

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        self.sample_ids, batch = next(self._batches)
        self._check_ids(batch)
        return batch

    def _check_ids(self, batch: Batch) -> None:
        """Refuse ids beyond the vocabulary: tensor parallelism would embed them as zeros, or as padding."""
        if self.vocab_size is None:
            return
        largest = max(int(batch[name].max()) for name in ("tokens", "labels"))
        if largest >= self.vocab_size:
            raise UserError(
                f"one of the samples {', '.join(map(str, self.sample_ids))} has the token id {largest}, but "
                f"model.vocab_size={self.vocab_size}: prepare the data with the tokenizer of the model"
            )

    def replicate(self) -> "BatchIterator":
        return replace(self)

    def _start(self) -> Iterator[tuple[list[int], Batch]]:
        if self.num_workers:
            batches: Any = iter(self._loader())  # starts the workers here, not in the thread
            return PrefetchIterator(batches, keep_thread=True)
        located = _LocatedSamples(self.dataset)
        batches = (collate([located[index] for index in ids]) for ids in self.make_sampler())
        return PrefetchIterator(map(pin_batch, batches)) if self.read_ahead else batches

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            _LocatedSamples(self.dataset),
            batch_sampler=self.make_sampler(),  # pyright: ignore[reportArgumentType] - any iterable of lists
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # without it, each loader draws a seed from the run's own generator
        )


@dataclass(eq=False)
class PlannedBatchIterator(BatchIterator):
    """A ``DataIterator`` over the microbatches of ``steps``, of which the sampler yields the indices."""

    steps: PlannedSteps = field(kw_only=True)

    def _start(self) -> Iterator[tuple[list[int], Batch]]:
        if self.num_workers:
            return PrefetchIterator(chain.from_iterable(self._loader()), keep_thread=True)
        steps = (self.steps[step] for step in self.make_sampler())
        batches = chain.from_iterable(steps)
        return PrefetchIterator(map(pin_batch, batches)) if self.read_ahead else batches

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            self.steps,
            batch_size=None,
            sampler=self.make_sampler(),  # pyright: ignore[reportArgumentType] - any iterable of steps
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),
        )


class _LocatedSamples(Dataset[LocatedSample]):
    def __init__(self, dataset: Dataset[Batch]) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> LocatedSample:
        return index, self._dataset[index]


def collate(samples: list[LocatedSample]) -> tuple[list[int], Batch]:
    """The indices of the samples, and one batch. Other keys, such as ``dataset_id`` of a blend, are dropped."""
    ids = [index for index, _ in samples]
    rows = [row for _, row in samples]
    if "cu_seqlens" in rows[0]:
        return ids, _concatenate_rows(rows) | _collect_media(rows)
    # before the sequence: positions may have three axes in front
    batch: Batch = {
        key: torch.stack([row[key] for row in rows], dim=rows[0][key].dim() - 1)
        for key in _keys_of(rows[0])
    }
    masks = [row.get("attention_mask") for row in rows]
    batch["attention_mask"] = None if masks[0] is None else default_collate(masks)
    return ids, batch | _collect_media(rows)


def _keys_of(row: Batch) -> list[str]:
    """The keys of ``row`` that have a value for each token."""
    return [*BATCH_KEYS, *(key for key in OPTIONAL_KEYS if key in row)]


def _collect_media(rows: list[Batch]) -> Batch:
    """The tensors of the images, which are decoded here: in a worker or a thread, ahead of the step."""
    row_images = [row["images"] for row in rows if "images" in row]
    if not row_images:
        return {}
    if isinstance(row_images[0], dict):  # decoded by the process that read them
        return {"media": join_media(row_images)}
    if row_images[0].media.share is None:
        return {}
    return {
        "media": row_images[0].media.pixels(
            [image for images in row_images for image in images.references]
        )
    }


def pin_batch(drawn: tuple[list[int], Batch]) -> tuple[list[int], Batch]:
    """The batch in pinned memory, from which a GPU copies asynchronously."""
    return (
        tree_map_only(torch.Tensor, torch.Tensor.pin_memory, drawn)
        if torch.cuda.is_available()
        else drawn
    )


def _concatenate_rows(rows: list[Batch]) -> Batch:
    batch: Batch = {
        key: torch.cat([row[key] for row in rows], dim=-1).unsqueeze(-2)
        for key in _keys_of(rows[0])
    }
    lengths = np.concatenate([np.diff(row["cu_seqlens"].numpy()) for row in rows])
    bounds = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
    return batch | {
        "attention_mask": None,
        "cu_seqlens": torch.from_numpy(bounds),
        # not the length of the row: Megatron-Core would then not restart positions at each sample
        "max_seqlen": int(lengths.max()),
    }


class BatchShard(NamedTuple):
    """The part of each batch that one data-parallel rank draws."""

    micro_batch_size: int
    global_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1


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
    image_share: tuple[int, int] | None = (0, 1),
    vocab_size: int | None = None,
    balance: bool = True,
    sharing: ContextSharing | None = None,
) -> Iterators:
    """Build the iterators of one data-parallel rank. All ranks must call this.

    In every layout, global batch ``k`` consists of the samples
    ``[k * global_batch_size, (k + 1) * global_batch_size)``.

    Args:
        sizes: number of samples for training, for all validation runs together, and for testing.
        micro_batch_size: samples that a rank draws at a time.
        global_batch_size: samples of one optimizer step.
        consumed_train: training samples that all ranks together have already drawn.
        consumed_valid: the same for validation.
        image_share: see ``DatasetRequest``.
        vocab_size: of the model, whose ids are below it; None checks none.
        balance: give all ranks about as many tokens of images in a global batch, all of which have one size.
        sharing: let data-parallel ranks share long samples; see ``context_plan``.
    """
    assert global_batch_size % (micro_batch_size * dp_size) == 0, (
        global_batch_size,
        micro_batch_size,
        dp_size,
    )
    request = DatasetRequest(sizes, tokenizer, image_share)
    shard = BatchShard(micro_batch_size, global_batch_size, dp_rank, dp_size)
    if isinstance(dataset_config, StreamingDatasetConfig):
        return dataset_config.iterators(request, shard, (consumed_train, consumed_valid))
    splits: Splits = dataset_config.build(request)

    def iterator(split: str, size: int, dataset: Any, consumed: int) -> BatchIterator | None:
        if dataset is None:
            return None
        _check_length(split, len(dataset), size, dataset_config, global_batch_size)
        if sharing is not None:
            return _planned_iterator(
                dataset, dataset_config, shard, sharing, tokenizer.eod, consumed, vocab_size
            )
        return make_iterator(
            dataset, dataset_config, shard, consumed, vocab_size=vocab_size, balance=balance
        )

    train, valid, test = map(iterator, SPLITS, sizes, splits, (consumed_train, consumed_valid, 0))
    return Iterators(train, valid, test)


def make_iterator(
    dataset: Any,
    config: DatasetConfig,
    shard: BatchShard,
    consumed: int = 0,
    prefetch: bool = True,
    vocab_size: int | None = None,
    balance: bool = True,
) -> BatchIterator:
    """The microbatches of a rank after the first ``consumed`` samples; ``prefetch=False`` reads nothing ahead."""
    micro, global_size, rank, ranks = shard
    common = (len(dataset), consumed, micro, rank, ranks)

    def make_sampler() -> Sampler:
        if (
            balance
            and config.dataloader_type != "cyclic"
            and ranks > 1
            and getattr(dataset, "has_images", False)
        ):
            return BalancedSampler(
                dataset.image_tokens, len(dataset), consumed, micro, global_size, rank, ranks
            )
        if config.dataloader_type == "single":
            return MegatronPretrainingSampler(*common)
        if config.dataloader_type == "batch":
            return MegatronPretrainingBatchSampler(
                len(dataset), consumed, micro, global_size, rank, ranks
            )
        return MegatronPretrainingRandomSampler(
            dataset,
            *common,
            data_sharding=config.data_sharding,
            seed=config.shuffle_seed,
            global_batch_size=global_size,
        )

    workers = config.num_workers * prefetch
    read_ahead = config.read_ahead and prefetch
    return BatchIterator(dataset, make_sampler, workers, read_ahead, vocab_size)


def _planned_iterator(
    dataset: Any,
    config: DatasetConfig,
    shard: BatchShard,
    sharing: ContextSharing,
    padding: int,
    consumed: int,
    vocab_size: int | None,
) -> BatchIterator:
    """The microbatches of a rank that shares long samples with others, after the first ``consumed`` rows."""
    _, global_size, rank, ranks = shard
    steps = PlannedSteps(dataset, global_size, rank, ranks, sharing, padding)
    remaining = range(consumed // global_size, len(steps))
    return PlannedBatchIterator(
        dataset,
        lambda: remaining,
        config.num_workers,
        config.read_ahead,
        vocab_size,
        steps=steps,
    )


def _check_length(
    split: str, length: int, needed: int, config: DatasetConfig, global_batch_size: int
) -> None:
    if length < global_batch_size:
        raise UserError(
            f"the {split} data has {length} samples, less than train.global_batch_size={global_batch_size}: use a "
            f"smaller batch, or more data"
        )
    if length < needed and config.dataloader_type != "cyclic":
        raise UserError(
            f"the run needs {needed} samples for {split}, but the data has {length}: train for fewer steps, set "
            f"dataset.dataloader_type=cyclic, or give the blend weights, which repeats its corpora"
        )


# names that other programs import from here
_CALLS = (
    "build_train_valid_test_data_loaders",
    "build_train_valid_test_datasets",
    "cyclic_iter",
    "get_train_valid_test_num_samples",
    "setup_data_iterators",
)
__getattr__ = lazy_names(
    __name__, {name: f"megatron.bridge.compat.data_loaders:{name}" for name in _CALLS}
)
