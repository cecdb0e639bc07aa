# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of a checkpoint: what they hold, proven before a byte moves, and views of it without copies.

A file is 8 bytes of header length, a JSON header and the tensors' bytes. Tensors are read through memory maps:
copying a slice of a view touches the slice's pages only, strided slices and other dtypes included, and the pages
are given back after each tensor so that a conversion does not hold the checkpoint in memory.
"""

import mmap
import threading
import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.utils import strict_json
from megatron.bridge.utils.errors import UserError, first_few

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LENGTH = 8
_LONGEST_NAME = 255  # bytes of a file's name, on all common file systems
_LONGEST_HEADER = 100 << 20  # the format's own limit

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes ``begin`` to ``end`` of ``file``."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def read_header(file: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of one file in the order of their bytes, and its metadata."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH), "little")
            if size < _LENGTH or length > min(_LONGEST_HEADER, size - _LENGTH):
                raise UserError(f"{file} is not a complete safetensors file: download it again")
            header = strict_json.loads(stream.read(length))
        metadata = header.pop("__metadata__", {})
        entries = [
            _parse_entry(file, name, item, _LENGTH + length) for name, item in header.items()
        ]
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} has a damaged header: download it again") from error
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = max((entry.end for entry in entries), default=_LENGTH + length)
    if size < end:
        raise UserError(f"{file} is truncated: {size} bytes of {end}; download it again")
    _check_places(file, entries, _LENGTH + length, size)
    return {entry.name: entry for entry in entries}, metadata


def _check_places(file: Path, entries: list[TensorEntry], begin: int, size: int) -> None:
    """The format wants every byte to be of one tensor: wrong places would be read as other numbers, in silence."""
    for entry in entries:
        if entry.begin != begin:
            raise UserError(
                f"{file} has a damaged header: {entry.name} is not behind the tensor before it; download it again"
            )
        begin = entry.end
    if begin != size:
        raise UserError(
            f"{file} has {size - begin} bytes behind its last tensor: download it again"
        )


def _parse_entry(file: Path, name: str, item: dict[str, Any], data: int) -> TensorEntry:
    code = item["dtype"]
    shape = tuple(item["shape"])
    if code not in DTYPES:
        raise UserError(
            f"{name} in {file} has dtype {code}, which is not supported: {', '.join(DTYPES)} are"
        )
    begin, end = item["data_offsets"]
    are_whole = all(type(value) is int for value in (*shape, begin, end))
    if not are_whole or min(shape, default=0) < 0:
        raise ValueError("shapes and offsets are whole numbers")
    entry = TensorEntry(name, file, DTYPES[code], shape, data + begin, data + end)
    if end - begin != torch.Size(shape).numel() * entry.dtype.itemsize:
        raise UserError(
            f"{name} in {file} has {end - begin} bytes, which is not {code} of shape {list(shape)}"
        )
    return entry


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor from the index of a sharded checkpoint."""
    try:
        weight_map = strict_json.loads(path.read_text())["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("a file has a name")
        outside = [
            file
            for file in weight_map.values()
            if Path(file).name != file or len(file.encode()) > _LONGEST_NAME
        ]
        if outside:
            raise UserError(
                f"{path} names {outside[0][:200]}: a shard must be a file of this folder"
            )
    except UserError:
        raise
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: download it again") from error
    return weight_map


class SafetensorsCheckpoint(Mapping[str, Tensor]):
    """The tensors of a model directory by name; ``checkpoint[name]`` is a read-only view, paged in when used.

    Args:
        directory: holds ``model.safetensors`` or its shards and their index.
        strip_prefix: prefix of all names in the files, which is left out here.
    """

    def __init__(self, directory: Path, strip_prefix: str = "") -> None:
        self.directory = directory
        self.as_stored = not strip_prefix
        """Whether the tensors are in the files as they appear here."""
        self._prefix = strip_prefix
        self.bytes_read = 0
        self._maps: dict[Path, tuple[mmap.mmap, Tensor]] = {}
        self._lock = threading.Lock()

    @cached_property
    def files(self) -> dict[str, tuple[dict[str, TensorEntry], dict[str, str]]]:
        """File name -> its tensors and metadata."""
        headers = {name: read_header(self.directory / name) for name in self._file_names}
        if self._index is not None:
            self._check_index(headers)
        return {
            file: (self._without_prefix(tensors), metadata)
            for file, (tensors, metadata) in headers.items()
        }

    def _without_prefix(self, tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        if not self._prefix:
            return tensors
        if not any(name.startswith(self._prefix) for name in tensors):
            raise UserError(
                f"strip_prefix={self._prefix!r}: no tensor in {self.directory} begins with it, for example "
                f"{first_few(list(tensors))}: remove it"
            )
        stripped = {name: name.removeprefix(self._prefix) for name in tensors}
        return {
            stripped[name]: replace(entry, name=stripped[name]) for name, entry in tensors.items()
        }

    @property
    def listed_names(self) -> Set[str] | None:
        """Names of the tensors, for which the index is enough; None if there is neither an index nor weights."""
        if self._index is not None:
            return {name.removeprefix(self._prefix) for name in self._index}
        return self.entries.keys() if (self.directory / SINGLE).is_file() else None

    @property
    def is_complete(self) -> bool:
        names = {SINGLE} if self._index is None else set(self._index.values())
        return all((self.directory / name).is_file() for name in names)

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        all_entries: dict[str, TensorEntry] = {}
        for tensors, _ in self.files.values():
            for name, entry in tensors.items():
                if name in all_entries:
                    raise UserError(
                        f"tensor {name} is in both {all_entries[name].file.name} and {entry.file.name}"
                    )
                all_entries[name] = entry
        return all_entries

    @cached_property
    def _index(self) -> dict[str, str] | None:
        path = self.directory / INDEX
        if not path.exists():
            return None
        weight_map = read_weight_map(path)
        if SINGLE not in weight_map.values() and (self.directory / SINGLE).exists():
            raise UserError(
                f"{self.directory} has both {SINGLE} and {INDEX} without it: remove the stale one"
            )
        return weight_map

    @property
    def _file_names(self) -> list[str]:
        if self._index is not None:
            names = sorted(set(self._index.values()))
            missing = [name for name in names if not (self.directory / name).is_file()]
            if missing:
                raise UserError(
                    f"{self.directory} lacks {first_few(missing)}, which {INDEX} names: download it again"
                )
            return names
        if (self.directory / SINGLE).is_file():
            return [SINGLE]
        raise UserError(
            f"{self.directory} has neither {SINGLE} nor {INDEX}: "
            "save the model with transformers' save_pretrained to get safetensors files"
        )

    def _check_index(
        self, headers: Mapping[str, tuple[dict[str, TensorEntry], dict[str, str]]]
    ) -> None:
        assert self._index is not None
        for name, file in self._index.items():
            if name not in headers[file][0]:
                raise UserError(
                    f"tensor {name} is not in {file}, though {INDEX} of {self.directory} says so"
                )
        for file, (tensors, _) in headers.items():
            extra = [name for name in tensors if self._index.get(name) != file]
            if extra:
                raise UserError(
                    f"{file} of {self.directory} holds {first_few(extra)}, which {INDEX} does not name"
                )

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = self._mapped(entry.file)[1][entry.begin : entry.end]
        if entry.begin % entry.dtype.itemsize:
            raw = raw.clone()  # the format does not promise alignment
        return raw.view(entry.dtype).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def copy(self, name: str, index: tuple[int | slice, ...], target: Tensor) -> None:
        """Copy a part of a tensor into ``target``, whatever its strides, dtype and device.

        Args:
            index: which part, as a view ``tensor[index]``; a scalar is copied whole.
        """
        tensor = self[name]
        target.copy_(tensor[index] if tensor.ndim else tensor)
        self._count(target.numel() * tensor.itemsize)

    def _count(self, read: int) -> None:
        with self._lock:
            self.bytes_read += read

    def release(self, name: str, row: int | None = None) -> None:
        """Give back the memory in which the pages of a tensor, or of one row of it, were mapped.

        They can still be read.
        """
        entry = self.entries[name]
        mapped = self._maps.get(entry.file)
        begin = entry.begin
        end = entry.end
        if row is not None:
            size = (end - begin) // entry.shape[0]
            begin, end = begin + row * size, begin + (row + 1) * size
        if mapped is not None and end > begin:
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            mapped[0].madvise(mmap.MADV_DONTNEED, page, end - page)

    def _mapped(self, file: Path) -> tuple[mmap.mmap, Tensor]:
        with self._lock:
            if file not in self._maps:
                with file.open("rb") as stream, warnings.catch_warnings():
                    # a writable private map would count against the memory limit, file by file
                    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                    warnings.filterwarnings("ignore", message="The given buffer is not writable")
                    self._maps[file] = mapped, torch.frombuffer(mapped, dtype=torch.uint8)
            return self._maps[file]
