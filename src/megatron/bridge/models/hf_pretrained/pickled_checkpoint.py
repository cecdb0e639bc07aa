# SPDX-License-Identifier: Apache-2.0
"""Weights in ``pytorch_model.bin``, as models had them before safetensors, read without running code."""

import pickle
from collections.abc import Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron.bridge.models.hf_pretrained.safetensors_files import (
    SafetensorsCheckpoint,
    TensorEntry,
    read_weight_map,
)
from megatron.bridge.utils.errors import UserError, first_few

PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"


def is_pickled(directory: Path) -> bool:
    """Return whether a model's folder has weights in pickled files only; transformers prefers safetensors, too."""
    has_safetensors = any(directory.glob("*.safetensors*"))
    has_pickled = any((directory / name).is_file() for name in (PICKLED, PICKLED_INDEX))
    return has_pickled and not has_safetensors


class PickledCheckpoint(SafetensorsCheckpoint):
    """The tensors of ``pytorch_model.bin`` or its shards, by name.

    The files are mapped into memory: a tensor is read when it is used. PyTorch's restricted unpickler reads their
    structure, which admits tensors and containers only.
    """

    def __init__(self, directory: Path, strip_prefix: str = "") -> None:
        super().__init__(directory, strip_prefix)
        self.as_stored = False  # an export writes safetensors

    @cached_property
    def files(self) -> dict[str, tuple[dict[str, TensorEntry], dict[str, str]]]:
        files: dict[str, tuple[dict[str, TensorEntry], dict[str, str]]] = {}
        for file, tensors in self._tensors_by_file.items():
            path = self.directory / file
            entries = {name: _entry_of(path, name, tensor) for name, tensor in tensors.items()}
            files[file] = self._without_prefix(entries), {}
        return files

    @cached_property
    def _tensors_by_file(self) -> dict[str, dict[str, Tensor]]:
        tensors_by_file = {name: _read_pickle(self.directory / name) for name in self._file_names}
        for name, file in (self._index or {}).items():
            if name not in tensors_by_file[file]:
                raise UserError(
                    f"tensor {name} is not in {file}, though {PICKLED_INDEX} of {self.directory} says so"
                )
        return tensors_by_file

    @property
    def listed_names(self) -> Set[str] | None:
        return self.entries.keys()

    @property
    def is_complete(self) -> bool:
        names = {PICKLED} if self._index is None else set(self._index.values())
        return all((self.directory / name).is_file() for name in names)

    @cached_property
    def _index(self) -> dict[str, str] | None:
        path = self.directory / PICKLED_INDEX
        return read_weight_map(path) if path.exists() else None

    @property
    def _file_names(self) -> list[str]:
        if self._index is None:
            return [PICKLED]
        names = sorted(set(self._index.values()))
        missing = [name for name in names if not (self.directory / name).is_file()]
        if missing:
            raise UserError(
                f"{self.directory} lacks {first_few(missing)}, which {PICKLED_INDEX} names: download it again"
            )
        return names

    def __getitem__(self, name: str) -> Tensor:
        tensors = self._tensors_by_file[self.entries[name].file.name]
        return tensors[name] if name in tensors else tensors[self._prefix + name]

    def release(self, name: str, row: int | None = None) -> None:
        """Do nothing: the kernel drops pages of a mapped file when it needs the memory."""


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one pickled file.

    Raises:
        UserError: the file is damaged, or contains more than tensors.
    """
    try:
        try:
            state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before PyTorch 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} contains more than tensors, and reading it could run code: where you trust it, load it with "
            "transformers and save_pretrained, which writes safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path} is not a complete PyTorch file: download it again") from error
    values = cast(Mapping[str, Any], state) if isinstance(state, Mapping) else {}
    non_tensors = [str(name) for name, value in values.items() if not isinstance(value, Tensor)]
    if not values or non_tensors:
        raise UserError(
            f"{path} is not a state dict of "
            f"tensors{': it has ' + first_few(non_tensors) if non_tensors else ''}; save the "
            "model with save_pretrained"
        )
    return dict(values)


def _entry_of(path: Path, name: str, tensor: Tensor) -> TensorEntry:
    return TensorEntry(
        name=name,
        file=path,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        begin=0,
        end=tensor.numel() * tensor.itemsize,
    )
