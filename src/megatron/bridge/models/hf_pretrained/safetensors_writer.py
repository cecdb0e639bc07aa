# SPDX-License-Identifier: Apache-2.0
"""Safetensors files that are laid out first and filled in any order, by any number of threads and processes.

The place of every byte follows from names, dtypes and shapes, so a tensor is written straight from where it is and
never collected.
"""

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron.bridge.models.hf_pretrained.safetensors_files import (
    CODES,
    INDEX,
    SINGLE,
    SafetensorsCheckpoint,
    TensorEntry,
)
from megatron.bridge.utils.errors import UserError, first_few

SHARD_BYTES = 5 * 10**9
_ALIGNMENT = 8

TensorSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape


@dataclass(frozen=True)
class FileLayout:
    """One file: its header, and where each tensor lies (``TensorEntry.file`` is the file's bare name)."""

    name: str
    header: bytes
    entries: dict[str, TensorEntry]

    @property
    def size(self) -> int:
        return max((entry.end for entry in self.entries.values()), default=len(self.header))


def output_files_like(source: SafetensorsCheckpoint, tensors: TensorSpecs) -> list[FileLayout]:
    """The files of ``source`` for ``tensors``; a file with the same tensors gets the same header, byte for byte.

    Tensors that the source lacks are added to ``model.safetensors`` if the source has this file, because transformers
    reads it and no other; otherwise they go into additional shards. Of a quantized source nothing can be kept.
    """
    if not source.as_stored:
        return new_output_files(tensors)
    additional = {name: spec for name, spec in tensors.items() if name not in source.entries}
    layouts: list[FileLayout] = []
    for file, (entries, metadata) in source.files.items():
        specs = {name: tensors[name] for name in entries if name in tensors}
        if file == SINGLE:
            specs |= additional
        if specs == {name: (entry.dtype, entry.shape) for name, entry in entries.items()}:
            layouts.append(FileLayout(file, _header_of(source.directory / file), entries))
        elif specs:
            layouts.append(_output_file(file, specs, metadata))
    if SINGLE not in source.files:
        layouts += _additional_shards(additional)
    return layouts


def _additional_shards(tensors: TensorSpecs) -> list[FileLayout]:
    """Return shards whose names begin like those of a model, but equal none of them."""
    shards: list[FileLayout] = []
    for layout in new_output_files(tensors):
        specs = {name: (entry.dtype, entry.shape) for name, entry in layout.entries.items()}
        name = layout.name.replace("model", "model-extra", 1)
        shards.append(_output_file(name, specs, {"format": "pt"}))
    return shards


def new_output_files(tensors: TensorSpecs, shard_bytes: int = SHARD_BYTES) -> list[FileLayout]:
    """Files of at most ``shard_bytes``, unless one tensor is larger, named as transformers names them."""
    groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = []
    free_bytes = 0
    for name, item in tensors.items():
        size = _tensor_bytes(*item)
        if not groups or size > free_bytes:
            groups.append({})
            free_bytes = shard_bytes
        groups[-1][name] = item
        free_bytes -= size
    if len(groups) == 1:
        return [_output_file(SINGLE, groups[0], {"format": "pt"})]
    names = (
        f"model-{index:05d}-of-{len(groups):05d}.safetensors" for index in range(1, len(groups) + 1)
    )
    return [
        _output_file(name, group, {"format": "pt"})
        for name, group in zip(names, groups, strict=True)
    ]


def write_index(
    directory: Path, layouts: Iterable[FileLayout], source: SafetensorsCheckpoint | None
) -> None:
    """Write the index where there are several files, or where the source has one; unchanged if it still holds."""
    weight_map = {name: layout.name for layout in layouts for name in layout.entries}
    sizes = sum(entry.end - entry.begin for layout in layouts for entry in layout.entries.values())
    original = source.directory / INDEX if source is not None and source.as_stored else None
    if original is not None and original.is_file():
        text = original.read_text()
        if json.loads(text)["weight_map"] == weight_map:
            (directory / INDEX).write_text(text)
            return
    if set(weight_map.values()) == {SINGLE}:
        return
    index = {"metadata": {"total_size": sizes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def create(directory: Path, layouts: Iterable[FileLayout]) -> None:
    """Make the files with their headers and full size."""
    layouts = list(layouts)
    needed = sum(layout.size for layout in layouts)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"{directory.parent} has {free / 1e9:.2f} GB free and the model needs {needed / 1e9:.2f} GB: "
            "free some space or choose another directory"
        )
    for layout in layouts:
        with (directory / layout.name).open("wb") as file:
            file.write(layout.header)
            file.truncate(layout.size)


def not_finite(values: Tensor) -> int:
    """How many of ``values`` are NaN or infinite."""
    if not values.is_floating_point() or values.dtype.itemsize == 1 or not values.numel():
        return 0
    if torch.stack(values.aminmax()).isfinite().all():  # one pass over the memory without a copy
        return 0
    return int(values.numel() - values.isfinite().sum())


class Writer:
    """Fills files that ``create`` made; usable from several threads."""

    def __init__(self, directory: Path, layouts: Iterable[FileLayout]) -> None:
        self._entries: dict[str, TensorEntry] = {}
        self._descriptors: dict[Path, int] = {}
        self._unwritten: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._not_finite: dict[str, int] = {}
        self.written: set[str] = set()
        """Tensors of which something was written."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of the tensors that have a place."""
        for layout in layouts:
            self.shapes |= {name: entry.shape for name, entry in layout.entries.items()}
            path = Path(layout.name)
            self._unwritten[path] = layout.size - len(layout.header)
            self._descriptors[path] = os.open(directory / layout.name, os.O_WRONLY)
            self._entries |= {
                name: replace(entry, file=path) for name, entry in layout.entries.items()
            }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        if names := [f"{name} ({count:,})" for name, count in self._not_finite.items()]:
            sys.stderr.write(
                f"warning: tensors with values that are NaN or infinite: {first_few(names)}\n"
            )

    def write(self, name: str, start: int, rows: Tensor) -> None:
        """Write rows ``start`` and following of a tensor, in the dtype of the layout.

        Args:
            start: index along the first dimension.
            rows: the numbers, on any device.
        """
        entry = self._entries[name]
        self.written.add(name)
        data = rows.detach().to(device="cpu", dtype=entry.dtype).contiguous()
        row = (entry.end - entry.begin) // entry.shape[0] if entry.shape and entry.shape[0] else 0
        position = entry.begin + start * row
        assert position + data.nbytes <= entry.end, f"{name} is larger than its place in the file"
        if count := not_finite(data):
            with self._lock:
                self._not_finite[name] = self._not_finite.get(name, 0) + count
        view = memoryview(data.reshape(-1).view(torch.uint8).numpy())
        while view:
            count = os.pwrite(self._descriptors[entry.file], view, position)
            view = view[count:]
            position = position + count
        self._flush(entry.file, data.nbytes)

    def _flush(self, file: Path, written: int) -> None:
        """Start a file on its way to the disk once it is complete, while the other thread goes on writing."""
        with self._lock:
            self._unwritten[file] -= written
            complete = self._unwritten[file] == 0
        if complete:
            os.fsync(self._descriptors[file])


def _output_file(name: str, tensors: TensorSpecs, metadata: Mapping[str, str]) -> FileLayout:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for tensor, (dtype, shape) in tensors.items():
        size = _tensor_bytes(dtype, shape)
        header[tensor] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = 8 + len(text)
    entries = {
        tensor: TensorEntry(
            tensor,
            Path(name),
            dtype,
            shape,
            *(data + offset for offset in header[tensor]["data_offsets"]),
        )
        for tensor, (dtype, shape) in tensors.items()
    }
    return FileLayout(name, len(text).to_bytes(8, "little") + text, entries)


def _header_of(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def _tensor_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
