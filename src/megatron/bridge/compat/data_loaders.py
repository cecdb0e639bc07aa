# SPDX-License-Identifier: Apache-2.0
"""Datasets and loaders of a config, for programs with loops of their own."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

from torch import distributed as dist
from torch.utils.data import DataLoader

from megatron.bridge.data.dataset_config import DatasetConfig, DatasetRequest, Splits
from megatron.bridge.data.loaders import BatchIterator, BatchShard, make_iterator
from megatron.bridge.data.tokenizer import build_tokenizer
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.batch_size import (
    EvaluationBatch,
    evaluation_batch,
    samples_of,
)
from megatron.bridge.training.evaluation import iterators_per_chunk

Sizes = tuple[int, int, int]
DatasetsProvider = Callable[..., tuple[Any, Any, Any]]
"""A function from the numbers of samples for each split, and a dataset config, to datasets."""


def get_dataset_provider(dataset_config: DatasetConfig) -> DatasetsProvider:
    """Return the function that builds the datasets of a config.

    Its arguments are the numbers of samples for training, validation and testing, the config, and
    ``tokenizer``, which any text needs.
    """
    del dataset_config  # the config that is passed to the function builds itself

    def provide(
        train_val_test_num_samples: Iterable[int], config: DatasetConfig, tokenizer: Any = None
    ) -> Splits:
        train, valid, test = train_val_test_num_samples
        return config.build(DatasetRequest((train, valid, test), tokenizer))

    return provide


def get_train_valid_test_num_samples(cfg: ConfigContainer) -> Sizes:
    """Return the numbers of samples for training, for all evaluations together, and for testing."""
    iterations = cfg.train.train_iters
    validation = cfg.validation
    rounds = iterations // validation.eval_interval + 1 if validation.eval_interval else 0
    held_out = validation.eval_iters * evaluation_batch(cfg).total
    return samples_of(cfg.train), rounds * held_out, held_out


def build_train_valid_test_datasets(
    cfg: ConfigContainer, build_train_valid_test_datasets_provider: DatasetsProvider
) -> tuple[Any, Any, Any]:
    """Call the provider with the sizes of ``cfg`` and ``cfg.dataset``; it must know its tokenizer."""
    sizes = get_train_valid_test_num_samples(cfg)
    return build_train_valid_test_datasets_provider(sizes, cfg.dataset)


def build_train_valid_test_data_loaders(
    cfg: ConfigContainer,
    train_state: Any,
    build_train_valid_test_datasets_provider: DatasetsProvider,
    dp_group: dist.ProcessGroup,
    *,
    eval_dp_group: dist.ProcessGroup | None = None,
) -> tuple[DataLoader[Any] | None, DataLoader[Any] | None, DataLoader[Any] | None]:
    """Build the loaders of one data-parallel rank, each of which yields microbatches.

    Args:
        cfg: The validated config; ``cfg.dataset`` has the settings of the loaders.
        train_state: Progress; training starts after ``consumed_train_samples``.
        build_train_valid_test_datasets_provider: Builds the datasets, see ``get_dataset_provider``.
        dp_group: Ranks that share the training samples.
        eval_dp_group: Ranks that share the others; None is ``dp_group``.
    """
    datasets = build_train_valid_test_datasets(cfg, build_train_valid_test_datasets_provider)
    of_training = EvaluationBatch(cfg.train.micro_batch_size, cfg.train.global_batch_size)
    of_evaluation = evaluation_batch(cfg)
    batches = (of_training, of_evaluation, of_evaluation)
    starts = (train_state.consumed_train_samples, 0, 0)
    groups = (dp_group, eval_dp_group or dp_group, eval_dp_group or dp_group)
    train, valid, test = (
        None if dataset is None else _loader(_iterator(cfg, dataset, start, group, batch))
        for dataset, start, group, batch in zip(datasets, starts, groups, batches, strict=True)
    )
    setattr(train_state, "do_train", train is not None and cfg.train.train_iters > 0)  # noqa: B010
    setattr(train_state, "do_valid", valid is not None and cfg.validation.eval_iters > 0)  # noqa: B010
    setattr(train_state, "do_test", test is not None and cfg.validation.eval_iters > 0)  # noqa: B010
    return train, valid, test


def _iterator(
    cfg: ConfigContainer,
    dataset: Any,
    consumed: int,
    group: dist.ProcessGroup,
    batch: EvaluationBatch,
) -> BatchIterator:
    shard = BatchShard(batch.micro, batch.total, group.rank(), group.size())
    return make_iterator(
        dataset, cfg.dataset, shard, consumed, vocab_size=getattr(cfg.model, "vocab_size", None)
    )


class _Loader(DataLoader[Any]):
    """A loader whose batches are checked and collated as those of a run."""

    def __init__(self, iterator: BatchIterator) -> None:
        super().__init__(
            iterator.dataset,
            batch_sampler=cast(Any, iterator.make_sampler()),
            num_workers=0,
        )
        self._microbatches = iterator

    def __iter__(self) -> Any:  # type: ignore[override]
        return self._microbatches.replicate()


def _loader(iterator: BatchIterator) -> DataLoader[Any]:
    return _Loader(iterator)


def cyclic_iter(iter: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of ``iter`` again and again."""
    while True:
        yield from iter


def setup_data_iterators(
    cfg: ConfigContainer,
    train_state: Any,
    model_length: int,
    train_valid_test_datasets_provider: DatasetsProvider,
    dp_group: dist.ProcessGroup,
) -> tuple[Any, Any, Any]:
    """Return iterators over microbatches: one for each split, or a list of them with several chunks.

    Args:
        cfg: The validated config.
        train_state: Progress.
        model_length: Number of chunks of this rank.
        train_valid_test_datasets_provider: Builds the datasets, see ``get_dataset_provider``.
        dp_group: Ranks that share the samples.
    """
    loaders = build_train_valid_test_data_loaders(
        cfg, train_state, train_valid_test_datasets_provider, dp_group
    )
    train, valid, test = (
        None if loader is None else _per_chunk(iter(loader), model_length) for loader in loaders
    )
    return train, valid, test


def _per_chunk(iterator: Any, count: int) -> Any:
    return iterator if count == 1 else iterators_per_chunk(iterator, count)


def with_tokenizer(cfg: ConfigContainer) -> DatasetsProvider:
    """Return the provider of ``cfg.dataset`` with the tokenizer of ``cfg``."""
    return partial(get_dataset_provider(cfg.dataset), tokenizer=build_tokenizer(cfg.tokenizer))
