# SPDX-License-Identifier: Apache-2.0
"""Torch's reader of checkpoint files, which also reads large tensors in place and refuses to run code.

Torch reads all that a file holds of a tensor into fresh memory and copies what is needed from there. On a virtual
machine, fresh memory costs more than the reading itself, and a rank that needs a part of what another layout wrote
would read the rest for nothing.
"""

import io
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import torch as strategy
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.bridge.utils import storage, unpickling

# Bytes of a tensor in its file. For a smaller one, finding its place takes longer than copying it.
LARGE = 8 << 20
# Bytes that are read before they are copied to a GPU; a power of two, which PyTorch rounds pinned memory up to.
STAGING = 64 << 20


class InplaceReader(FileSystemReader):
    """Reads full tensors and ranges of rows without a copy, and everything else like torch."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything in ``plan`` into the tensors of ``planner``."""
        needed = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        storage.pull(Path(self.path), needed)
        other_items: list[ReadItem] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                self._read_object(item, planner)
            elif self._is_large(item):
                self._read_large(item, planner)
            else:
                other_items.append(item)
        return super().read_data(replace(plan, items=other_items), planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The same as torch's own reader, but the file cannot run code."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            metadata = unpickling.read_metadata(cast(Any, stream), str(path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _read_object(self, item: ReadItem, planner: LoadPlanner) -> None:
        """Check the bytes of an object before the planner unpickles them."""
        storage_info = self.storage_data[item.storage_index]
        path = self.fs.concat_path(self.path, storage_info.relative_path)
        with self.fs.create_stream(path, "rb") as stream:
            part = self._slice_file(cast(Any, stream), storage_info)
            content = self.transforms.transform_load_stream(
                item, storage_info.transform_descriptors or (), part
            ).read(-1)
        unpickling.read_torch(
            io.BytesIO(content), f"{path} ({item.storage_index.fqn})", map_location="cpu"
        )
        planner.load_bytes(item, io.BytesIO(content))

    def _is_large(self, item: ReadItem) -> bool:
        storage_info = self.storage_data[item.storage_index]
        return (
            item.type == LoadItemType.TENSOR
            and storage_info.length >= LARGE
            and not storage_info.transform_descriptors
        )

    def _read_large(self, item: ReadItem, planner: LoadPlanner) -> None:
        storage_info = self.storage_data[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        path = self.fs.concat_path(self.path, storage_info.relative_path)
        with self.fs.create_stream(path, "rb") as stream:
            part = self._slice_file(cast(Any, stream), storage_info)
            start = _contiguous_offset(part, item, target)
            part.seek(start or 0)
            if start is None:
                _copy_through_memory(part, item, target)
            else:
                _fill_from_file(target, part)
        planner.commit_tensor(item, target)


def _contiguous_offset(part: IO[bytes], item: ReadItem, target: Tensor) -> int | None:
    """The offset of ``target`` in ``part`` if its bytes are contiguous there; else None."""
    stored = cast(Tensor, torch.load(part, map_location="meta", weights_only=True))
    begin: int | None = getattr(stored.untyped_storage(), "_checkpoint_offset", None)
    whole_rows = tuple(item.lengths[1:]) == stored.shape[1:]
    alike = stored.dtype == target.dtype and item.lengths == target.shape
    plain = type(target) is Tensor and target.is_contiguous() and stored.is_contiguous()
    if begin is None or not (whole_rows and alike and plain):
        return None
    first = stored.storage_offset() + item.storage_offsets[0] * stored.stride(0)
    return begin + int(first) * stored.element_size()


def _fill_from_file(target: Tensor, part: IO[bytes]) -> None:
    """Read the bytes of ``target`` from the current position of ``part``."""
    flat = target.view(-1).view(torch.uint8)
    (_read_into if target.is_cpu else _read_in_blocks)(flat, part)


def _read_in_blocks(flat: Tensor, part: IO[bytes]) -> None:
    """Read to a GPU through a block of pinned memory."""
    staging = torch.empty(
        min(STAGING, len(flat)), dtype=torch.uint8, device="cpu", pin_memory=flat.is_cuda
    )
    for block in flat.split(len(staging)):
        _read_into(staging[: len(block)], part)
        block.copy_(staging[: len(block)])


def _read_into(flat: Tensor, part: IO[bytes]) -> None:
    left = memoryview(flat.numpy())
    while left:
        count = cast(Any, part).readinto(left)
        if not count:
            raise EOFError(f"{len(left)} bytes of a tensor are missing")
        left = left[count:]


def _copy_through_memory(part: IO[bytes], item: ReadItem, target: Tensor) -> None:
    """Copy through memory, like torch's own reader."""
    stored = cast(Tensor, torch.load(part, map_location="cpu", weights_only=True))
    requested = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
    assert requested.shape == target.shape, (
        f"{item.storage_index} is {requested.shape}, {target.shape} is wanted"
    )
    target.copy_(requested)


def _open_reader(checkpoint_dir: str | Path, *args: Any, **kwargs: Any) -> InplaceReader:
    return InplaceReader(checkpoint_dir)


# Megatron-Core takes no reader as an argument; several threads may read at once, so it is never set back.
strategy._get_filesystem_reader = serialization._get_filesystem_reader = _open_reader
