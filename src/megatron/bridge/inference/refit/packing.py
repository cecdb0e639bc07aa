# SPDX-License-Identifier: Apache-2.0
"""Pack many tensors into one block of memory, which needs one handle per bucket instead of one per tensor.

Processes of one machine share the memory; it is freed when they end.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.bridge.inference.refit.stream import WeightInfo
from megatron.bridge.utils.errors import UserError

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, so that they can be viewed in their dtype with vector loads."""


@dataclass(frozen=True)
class BucketSlot:
    """The place of a tensor in its bucket."""

    info: WeightInfo  # the tensor
    start: int  # first byte

    @property
    def stop(self) -> int:
        return self.start + self.info.bytes

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor in ``buffer`` without a copy."""
        return buffer[self.start : self.stop].view(self.info.dtype).view(self.info.shape)


def layout(infos: Sequence[WeightInfo], bucket_bytes: int) -> list[list[BucketSlot]]:
    """Return the tensors of each bucket, in order, with their offsets; equal on both sides.

    Buckets alternate between the start and the end of one buffer, so that one can be filled while the receiver reads
    the other. A tensor larger than half of ``bucket_bytes`` has its own bucket.

    Example:
        >>> infos = [WeightInfo(name, (10,), torch.float32) for name in "abc"]
        >>> [[(slot.info.name, slot.start) for slot in bucket] for bucket in layout(infos, 240)]
        [[('a', 0), ('b', 64)], [('c', 128)]]
    """
    buckets: list[list[BucketSlot]] = []
    end = 0
    for info in infos:
        start = _align_size(end)
        if not buckets or start + info.bytes > bucket_bytes // 2:
            buckets.append([])
            start = 0
        buckets[-1].append(BucketSlot(info, start))
        end = start + info.bytes
    sizes = [_align_size(bucket[-1].stop) for bucket in buckets]
    end = max((sum(sizes[index : index + 2]) for index in range(len(sizes))), default=0)
    return [
        [BucketSlot(slot.info, slot.start + (end - size if index % 2 else 0)) for slot in bucket]
        for index, (bucket, size) in enumerate(zip(buckets, sizes, strict=True))
    ]


def _align_size(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def buffer_bytes(buckets: Sequence[Sequence[BucketSlot]]) -> int:
    """Return the number of bytes that hold any two successive buckets."""
    return max((bucket[-1].stop for bucket in buckets), default=0)


def views(buffer: Tensor, bucket: Sequence[BucketSlot]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a bucket without copies; they are valid until the buffer is filled again."""
    for slot in bucket:
        yield slot.info.name, slot.view(buffer)


_MEMORY = Path("/dev/shm")


class SharedBuffer:
    """Bytes in a memory file, or on disk if memory is full.

    The file is removed when all receivers have opened it; the memory exists while any process maps it.
    """

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self.path = _reserve_file(self.size)
        self.bytes = attached(self.path, self.size)

    def unlink(self) -> None:
        with suppress(FileNotFoundError):
            self.path.unlink()


def attached(path: Path, size: int) -> Tensor:
    """Return the bytes [size] of a buffer that another process created."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _reserve_file(size: int) -> Path:
    folders = [folder for folder in (_MEMORY, Path(tempfile.gettempdir())) if folder.is_dir()]
    for folder in folders:
        handle, name = tempfile.mkstemp(prefix="megatron-bridge-refit-", dir=folder)
        try:
            os.posix_fallocate(handle, 0, size)
            return Path(name)
        except OSError:
            Path(name).unlink()
        finally:
            os.close(handle)
    raise UserError(
        f"no room for a bucket of {size >> 20} MB in {' or '.join(map(str, folders))}: lower bucket_bytes, or "
        "give the container more shared memory"
    )
