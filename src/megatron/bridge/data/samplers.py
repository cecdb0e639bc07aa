# SPDX-License-Identifier: Apache-2.0
"""Which samples a data-parallel rank takes, in which order.

The samplers yield one microbatch of sample ids at a time. Global batch ``k`` is samples
``[k * global_batch_size, (k + 1) * global_batch_size)`` of the order, whatever the layout.
"""

from collections.abc import Iterator, Sized

import numpy as np


class _Sampler:
    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        assert total_samples > 0, f"no sample to draw from: {total_samples}"
        assert consumed_samples >= 0, consumed_samples
        assert micro_batch_size > 0, micro_batch_size
        assert 0 <= data_parallel_rank < data_parallel_size, (data_parallel_rank, data_parallel_size)
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size

    def __len__(self) -> int:
        return self.total_samples

    @property
    def _stride(self) -> int:
        """Samples that all ranks draw together."""
        return self.micro_batch_size * self.data_parallel_size

    def _mine(self, ids: range) -> list[int]:
        start = self.data_parallel_rank * self.micro_batch_size
        return list(ids[start : start + self.micro_batch_size])


class MegatronPretrainingSampler(_Sampler):
    """Samples in order, once.

    Args:
        total_samples: length of the dataset.
        consumed_samples: samples that all ranks together have drawn before: the first one to draw.
        micro_batch_size: samples that one rank draws at a time.
        data_parallel_rank: this rank.
        data_parallel_size: number of ranks.
        drop_last: leave out an incomplete last draw; without it, ranks may get short or empty microbatches.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        super().__init__(total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.consumed_samples, self.total_samples, self._stride):
            ids = range(first, min(first + self._stride, self.total_samples))
            if len(ids) == self._stride or not self.drop_last:
                yield self._mine(ids)


class MegatronPretrainingBatchSampler(_Sampler):
    """Samples in order, once; those of a global batch are dealt out one by one.

    Global batch ``k`` holds the same samples as with ``MegatronPretrainingSampler``, but each rank gets every
    ``data_parallel_size``-th of them: where neighbours are alike (files sorted by length), ranks get equal work.

    Args:
        total_samples: length of the dataset.
        consumed_samples: samples that all ranks together have drawn before: the first one to draw.
        micro_batch_size: samples that one rank draws at a time.
        global_batch_size: samples of one optimizer step.
        data_parallel_rank: this rank.
        data_parallel_size: number of ranks.
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
        super().__init__(total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        assert global_batch_size % self._stride == 0, (global_batch_size, self._stride)
        self.global_batch_size = global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        last = self.total_samples - self.global_batch_size
        for first in range(self.consumed_samples, last + 1, self.global_batch_size):
            mine = range(first, first + self.global_batch_size)[self.data_parallel_rank :: self.data_parallel_size]
            for place in range(0, len(mine), self.micro_batch_size):
                yield list(mine[place : place + self.micro_batch_size])


class MegatronPretrainingRandomSampler(_Sampler):
    """Samples in a new order each epoch, without end.

    The order depends on ``seed`` and the epoch only. An epoch leaves out the samples that do not fill a global
    batch, so that it ends at the same sample in every layout.

    Args:
        dataset: what is drawn from; only for symmetry with Megatron's constructor.
        total_samples: length of the dataset.
        consumed_samples: samples that all ranks together have drawn before, over all epochs.
        micro_batch_size: samples that one rank draws at a time.
        data_parallel_rank: this rank.
        data_parallel_size: number of ranks.
        data_sharding: each rank shuffles a part of the dataset of its own. Reads stay local, but the order then
            depends on the number of ranks.
        seed: seed of the order.
        global_batch_size: samples of one optimizer step; by default one draw of all ranks.
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
        super().__init__(total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
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
            yield from self._sharded(epoch, offset) if self.data_sharding else self._shared(epoch, offset)
            position = (epoch + 1) * self.samples_per_epoch

    def _shared(self, epoch: int, offset: int) -> Iterator[list[int]]:
        """One order for all ranks, dealt out in turn."""
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
