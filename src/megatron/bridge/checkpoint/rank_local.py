# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a state, on its local disk or in its memory, for the same rank under the same layout.

Ranks do not plan or communicate; each keeps its part as it is. This is fast, needs no shared file system, and works as
long as every rank finds its part again.
"""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)

from megatron.bridge.checkpoint import manifest, paths
from megatron.bridge.checkpoint.hashing_writer import without_zip_checksums
from megatron.bridge.checkpoint.host_buffers import HostBuffer, with_own_storage
from megatron.bridge.checkpoint.manifest import DamagedError, VerifyMode
from megatron.bridge.utils import atomic, strict_json, unpickling
from megatron.bridge.utils.errors import UserError

STATE = "state.pt"
ORIGIN = "origin.json"


def state_values(state: dict[str, Any]) -> dict[str, Any]:
    """The values in Megatron's sharded state dict, without their descriptions; tensors share memory."""
    return _change_each(
        lambda entry: entry.data if isinstance(entry, ShardedBase) else entry, state
    )


def copy_into(state: Any, content: Any, directory: Path, name: str = "the state") -> Any:
    """Copy ``content`` into the tensors that ``state`` describes, and return the full state."""
    if isinstance(state, dict):
        if not isinstance(content, dict) or state.keys() - content.keys():
            raise _foreign_checkpoint(directory, name)
        return {
            key: copy_into(entry, content[key], directory, str(key)) for key, entry in state.items()
        }
    if isinstance(state, (ShardedTensor, ShardedTensorFactory)):
        assert state.data is not None, f"{name} describes nothing"
        if not isinstance(content, torch.Tensor) or content.shape != state.data.shape:
            raise _foreign_checkpoint(directory, name)
        state.data.detach().copy_(content)
        return state.data
    return copy.deepcopy(content)  # what is kept in memory may be needed again


def _change_each(change: Callable[[Any], Any], content: dict[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], dict_list_map_outplace(change, content))


def _foreign_checkpoint(directory: Path, name: str) -> UserError:
    return UserError(
        f"checkpoint {directory} is not of this model: {name} differs; undo the change, or remove it to go on from "
        "the persistent checkpoint before"
    )


class DiskStore:
    """A directory in ``root`` for each iteration of this rank, published atomically and hashed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def iterations(self) -> list[int]:
        """The iterations on disk, complete or not."""
        return paths.published_iterations(self._root)

    def place(self, iteration: int) -> Path:
        return paths.iteration_dir(self._root, iteration)

    def origin(self, iteration: int) -> dict[str, Any]:
        """The metadata of an iteration; raises a ``DamagedError`` if it cannot be read."""
        return read_origin(self.place(iteration))

    def save(self, iteration: int, content: dict[str, Any], origin: dict[str, Any]) -> None:
        """Save ``content`` with metadata about its origin; earlier iterations are kept."""
        paths.recover(self._root)
        records: manifest.FileRecords = {}
        with atomic.published_directory(self.place(iteration), overwrite=True) as staging:
            with (
                manifest.hashing(staging / STATE, records, STATE) as stream,
                without_zip_checksums(),
            ):
                torch.save(_change_each(_on_host, content), cast(Any, stream))
            write_origin(staging, origin)
            manifest.write(staging, iteration, manifest.new_save_id(), records)

    def verify(self, iteration: int, mode: VerifyMode) -> None:
        """Raise a ``DamagedError`` unless it is what was saved."""
        directory = self.place(iteration)
        stored_manifest = manifest.read(directory)
        if stored_manifest is None:
            raise DamagedError.of(directory, f"{manifest.NAME} is missing")
        manifest.check_identity(directory, stored_manifest, iteration)
        if sentences := manifest.problems(directory, stored_manifest, stored_manifest.files, mode):
            raise DamagedError.of(directory, ", ".join(sentences))

    def load(self, iteration: int) -> dict[str, Any]:
        file = self.place(iteration) / STATE
        return unpickling.read_torch(file, str(file), map_location="cpu", mmap=True)

    def keep_only(self, iteration: int | None) -> None:
        for stored_iteration in self.iterations():
            if stored_iteration != iteration:
                paths.remove(self._root, stored_iteration)
        if iteration is None:
            shutil.rmtree(self._root, ignore_errors=True)


@dataclass
class _MemoryCopy:
    content: dict[str, Any]
    origin: dict[str, Any]
    memory: HostBuffer


class MemoryStore:
    """Copies in host memory, which outlive the run but not the process.

    There are at most two. The older one is dropped when every rank has the newer one, and its memory is reused.
    """

    _of_run: ClassVar[dict[str, "MemoryStore"]] = {}

    def __init__(self) -> None:
        self._kept: dict[int, _MemoryCopy] = {}
        self._free: list[HostBuffer] = []

    @classmethod
    def of(cls, name: str) -> "MemoryStore":
        """The store of a run, the same one for the lifetime of the process."""
        return cls._of_run.setdefault(name, cls())

    def iterations(self) -> list[int]:
        return sorted(self._kept)

    def place(self, iteration: int) -> Path:
        return paths.iteration_dir("memory", iteration)

    def origin(self, iteration: int) -> dict[str, Any]:
        return self._kept[iteration].origin

    def save(self, iteration: int, content: dict[str, Any], origin: dict[str, Any]) -> None:
        memory = self._free.pop() if self._free else HostBuffer()
        tensors = [entry for entry in nested_values(content) if isinstance(entry, torch.Tensor)]
        copies = iter(memory.copy_tensors(tensors))
        copied_content = _change_each(
            lambda entry: next(copies) if isinstance(entry, torch.Tensor) else copy.deepcopy(entry),
            content,
        )
        self._kept[iteration] = _MemoryCopy(
            copied_content, origin, memory
        )  # only now: a copy that broke off is not there

    def verify(self, iteration: int, mode: VerifyMode) -> None:
        pass  # no disk has had it

    def load(self, iteration: int) -> dict[str, Any]:
        return self._kept[iteration].content

    def keep_only(self, iteration: int | None) -> None:
        for stored_iteration in [key for key in self._kept if key != iteration]:
            self._free.append(self._kept.pop(stored_iteration).memory)
        if iteration is None:
            self._free.clear()


RankLocalStore = DiskStore | MemoryStore  # where one rank keeps its parts, by iteration


def write_origin(directory: Path, origin: dict[str, Any]) -> None:
    (directory / ORIGIN).write_text(json.dumps(origin) + "\n")


def read_origin(directory: Path) -> dict[str, Any]:
    """The metadata that ``write_origin`` wrote; raises a ``DamagedError`` if it is missing or incomplete."""
    try:
        return strict_json.loads((directory / ORIGIN).read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedError.of(directory, f"{ORIGIN} cannot be read ({error})") from error


def _on_host(entry: Any) -> Any:
    return with_own_storage(entry.detach().cpu()) if isinstance(entry, torch.Tensor) else entry
