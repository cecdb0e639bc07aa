# SPDX-License-Identifier: Apache-2.0
"""Which samples a data-parallel rank draws, in which order.

A sampler yields the sample ids of one microbatch at a time. Whatever the layout, global batch ``k`` consists of
the samples ``[k * global_batch_size, (k + 1) * global_batch_size)`` of the order.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class _Sampler:
    total_samples: int
    consumed_samples: int
    """Samples that all ranks together have already drawn."""
    micro_batch_size: int
    """Samples that one rank draws at a time."""
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        assert self.total_samples > 0, f"no sample to draw from: {self.total_samples}"
        assert self.consumed_samples >= 0, self.consumed_samples
        assert self.micro_batch_size > 0, self.micro_batch_size
        assert 0 <= self.data_parallel_rank < self.data_parallel_size, (
            self.data_parallel_rank,
            self,
        )

    def __len__(self) -> int:
        return self.total_samples

    @property
    def _stride(self) -> int:
        """Samples that all ranks draw together."""
        return self.micro_batch_size * self.data_parallel_size

    def _mine(self, ids: range) -> list[int]:
        start = self.data_parallel_rank * self.micro_batch_size
        return list(ids[start : start + self.micro_batch_size])


@dataclass(eq=False)
class MegatronPretrainingSampler(_Sampler):
    """Samples in order, once."""

    drop_last: bool = True
    """Drop an incomplete last draw; otherwise ranks may get short or empty microbatches."""

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.consumed_samples, self.total_samples, self._stride):
            ids = range(first, min(first + self._stride, self.total_samples))
            if len(ids) == self._stride or not self.drop_last:
                yield self._mine(ids)


class MegatronPretrainingBatchSampler(_Sampler):
    """Samples in order, once; the samples of a global batch are dealt out one by one.

    Global batch ``k`` holds the same samples as with ``MegatronPretrainingSampler``, but each rank gets every
    ``data_parallel_size``-th of them. If neighbors are alike (files sorted by length), all ranks get equal work.
    Further parameters are those of ``MegatronPretrainingSampler``.

    Args:
        global_batch_size: samples of one optimizer step.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        super().__init__(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        assert global_batch_size % self._stride == 0, (global_batch_size, self._stride)
        self.global_batch_size = global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        last = self.total_samples - self.global_batch_size
        for first in range(self.consumed_samples, last + 1, self.global_batch_size):
            local_ids = self._dealt(range(first, first + self.global_batch_size))
            for start in range(0, len(local_ids), self.micro_batch_size):
                yield list(local_ids[start : start + self.micro_batch_size])

    def _dealt(self, ids: range) -> Sequence[int]:
        """This rank's samples of a global batch."""
        return ids[self.data_parallel_rank :: self.data_parallel_size]


class BalancedSampler(MegatronPretrainingBatchSampler):
    """Samples in order, once; the samples of a global batch are dealt out so that all ranks have about as much work.

    Each rank gets as many samples, the most expensive ones first. Further parameters are those of
    ``MegatronPretrainingBatchSampler``.

    Args:
        cost: the work that a sample id makes.
    """

    def __init__(self, cost: Callable[[int], int], *sizes: int) -> None:
        super().__init__(*sizes)
        self.cost = cost

    def _dealt(self, ids: range) -> list[int]:
        capacity = len(ids) // self.data_parallel_size
        held: list[list[int]] = [[] for _ in range(self.data_parallel_size)]
        work = [0] * self.data_parallel_size
        costs = {sample_id: self.cost(sample_id) for sample_id in ids}
        for sample_id in sorted(ids, key=lambda sample_id: (-costs[sample_id], sample_id)):
            free = (rank for rank in range(len(held)) if len(held[rank]) < capacity)
            rank = min(free, key=lambda rank: (work[rank], rank))
            held[rank].append(sample_id)
            work[rank] += costs[sample_id]
        return sorted(held[self.data_parallel_rank])


class MegatronPretrainingRandomSampler(_Sampler):
    """Samples in a new order each epoch, without end.

    The order depends on ``seed`` and the epoch only. An epoch leaves out the samples that do not fill a global batch,
    so it ends at the same sample in every layout. Further parameters are those of ``MegatronPretrainingSampler``.

    Args:
        dataset: the dataset, which Megatron's constructor also takes; only its length is used.
        data_sharding: each rank shuffles its own part of the dataset. Reads stay local, but the order then depends
            on the number of ranks.
        seed: seed of the order.
        global_batch_size: samples of one optimizer step; None: what all ranks draw at a time.
    """

    def __init__(
        self,
        dataset: Sized | None,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool = False,
        seed: int = 1234,
        global_batch_size: int | None = None,
    ) -> None:
        super().__init__(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        assert dataset is None or len(dataset) == total_samples, (dataset, total_samples)
        unit = global_batch_size or self._stride
        assert unit % self._stride == 0, (unit, self._stride)
        assert total_samples >= unit, f"{total_samples} samples do not fill a batch of {unit}"
        self.data_sharding = data_sharding
        self.seed = seed
        self.samples_per_epoch = total_samples - total_samples % unit

    def __iter__(self) -> Iterator[list[int]]:
        position = self.consumed_samples
        while True:
            epoch, offset = divmod(position, self.samples_per_epoch)
            yield from (
                self._sharded(epoch, offset) if self.data_sharding else self._shared(epoch, offset)
            )
            position = (epoch + 1) * self.samples_per_epoch

    def _shared(self, epoch: int, offset: int) -> Iterator[list[int]]:
        """One order for all ranks, which take turns."""
        order = self._permutation(epoch, self.total_samples)
        for first in range(offset, self.samples_per_epoch - self._stride + 1, self._stride):
            yield order[self._mine(range(first, first + self._stride))].tolist()

    def _sharded(self, epoch: int, offset: int) -> Iterator[list[int]]:
        """An order within this rank's own contiguous part."""
        length = self.samples_per_epoch // self.data_parallel_size
        start = self.data_parallel_rank * length
        order = self._permutation(epoch, length)
        last = length - self.micro_batch_size
        for first in range(offset // self.data_parallel_size, last + 1, self.micro_batch_size):
            yield (start + order[first : first + self.micro_batch_size]).tolist()

    def _permutation(self, epoch: int, length: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(length)
