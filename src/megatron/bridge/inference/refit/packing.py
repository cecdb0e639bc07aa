# SPDX-License-Identifier: Apache-2.0
"""Many tensors in one piece of memory: one handle for a bucket instead of one for each tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.bridge.inference.refit.stream import WeightInfo

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, so that each can be viewed in its dtype and read by vectors."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its bucket.

    Attributes:
        info: the tensor.
        start: first byte.
    """

    info: WeightInfo
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.info.bytes

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor in ``buffer``, without a copy."""
        return buffer[self.start : self.stop].view(self.info.dtype).view(self.info.shape)


def layout(infos: Sequence[WeightInfo], bucket_bytes: int) -> list[list[Slot]]:
    """Which tensors go together, in order, and where; the same on both sides.

    Args:
        infos: of the tensors.
        bucket_bytes: of a bucket; a larger tensor has one of its own.

    Example:
        >>> infos = [WeightInfo(name, (10,), torch.float32) for name in "abc"]
        >>> [[(slot.info.name, slot.start) for slot in bucket] for bucket in layout(infos, 120)]
        [[('a', 0), ('b', 64)], [('c', 0)]]
    """
    buckets: list[list[Slot]] = []
    end = 0
    for info in infos:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if not buckets or start + info.bytes > bucket_bytes:
            buckets.append([])
            start = 0
        buckets[-1].append(Slot(info, start))
        end = start + info.bytes
    return buckets


def buffer_bytes(buckets: Sequence[Sequence[Slot]]) -> int:
    """Memory that holds any of the buckets."""
    return max((bucket[-1].stop for bucket in buckets), default=0)


def views(buffer: Tensor, bucket: Sequence[Slot]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a bucket, without copies; they are valid until the buffer is filled again."""
    for slot in bucket:
        yield slot.info.name, slot.view(buffer)
