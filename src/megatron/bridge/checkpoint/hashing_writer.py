# SPDX-License-Identifier: Apache-2.0
"""Torch's writer of checkpoint files, extended to hash what it writes and to write in the background.

A save has three parts: all ranks agree on who writes what (``prepare_save``), each rank writes its files
(``PreparedSave.write_files``), and the first rank writes the metadata (``PreparedSave.finish``). Only the first and the
last part communicate, so the middle one can run in a thread while training continues.
"""

import gc
import io
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.serialization import get_crc32_options, set_crc32_options

from megatron.bridge.checkpoint import bucket, manifest
from megatron.bridge.checkpoint.host_buffers import HostBuffer, with_own_storage
from megatron.bridge.utils import distributed, storage
from megatron.bridge.utils.storage_paths import url_of


class _HashingFiles(FileSystem):
    """Torch's file system, which records each file that it writes."""

    def __init__(self, records: manifest.FileRecords, cancelled: threading.Event) -> None:
        self._records = records
        self._cancelled = cancelled

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        name = Path(path).name.removesuffix(".tmp")  # renamed when it is complete
        with manifest.hashing(Path(path), self._records, name, self._cancelled) as stream:
            yield stream  # type: ignore[misc] - all that torch calls is there


class HashingWriter(FileSystemWriter):
    """Writes one file per rank.

    Attributes:
        records: Size and hash of the files that this process has written.
        cancelled: Once it is set, writing fails.
    """

    def __init__(self, directory: Path, save_id: str) -> None:
        # One thread: torch drops the error of a writer thread, and the checkpoint would lack its tensors.
        in_bucket = url_of(directory) is not None  # then the disk holds a copy for a while
        super().__init__(
            directory, thread_count=1, per_thread_copy_ahead=0, sync_files=not in_bucket
        )
        self.records: manifest.FileRecords = {}
        self.cancelled = threading.Event()
        self.fs = _HashingFiles(self.records, self.cancelled)
        self.save_id = save_id
        self._token = f"{bucket.token_of(directory)}_" if in_bucket else ""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The same as torch's, but shards on object storage get unique names."""
        global_plans = super().prepare_global_plan(plans)
        prefixes = [_StoragePrefix(plan.storage_data.prefix + self._token) for plan in global_plans]
        return [
            replace(plan, storage_data=prefix)
            for plan, prefix in zip(global_plans, prefixes, strict=True)
        ]


class _ResolvedPlanner(DefaultSavePlanner):
    """Returns the data that this rank writes in a form that torch does not copy first."""

    def __init__(self, resolve: Callable[[WriteItem], Any]) -> None:
        super().__init__()
        self._resolve = resolve

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = self._resolve(write_item)
        return with_own_storage(data) if isinstance(data, torch.Tensor) else data


@dataclass
class WrittenFiles:
    """What one rank has written: the location of each piece for torch, and a record of each file."""

    results: list[WriteResult]
    records: manifest.FileRecords


@dataclass
class PreparedSave:
    """A save that all ranks have agreed on; only the first rank has ``metadata``."""

    directory: Path
    writer: HashingWriter
    plan: SavePlan
    planner: SavePlanner
    metadata: Metadata | None

    def write_files(self) -> WrittenFiles:
        """Write this rank's files, without communication."""
        with without_zip_checksums():
            results = self.writer.write_data(self.plan, self.planner).wait()
        if url_of(self.directory) is not None:
            final = bucket.final_of(self.directory)
            storage.push(self.directory, self.writer.records, final, self.writer.cancelled)
        return WrittenFiles(results, self.writer.records)

    def finish(self, written: list[WrittenFiles]) -> manifest.FileRecords:
        """Write torch's ``.metadata``, on the first rank; returns the records of the files of all ranks."""
        assert self.metadata is not None, "the first rank finishes a save"
        self.writer.finish(self.metadata, [entry.results for entry in written])
        records = dict(self.writer.records)
        for entry in written:
            records |= entry.records
        return records

    def copy_to(self, memory: HostBuffer) -> None:
        """Copy the data to write, so that training can change the original."""
        resolved = {id(item): self.planner.resolve_data(item) for item in self.plan.items}
        tensors = {name: data for name, data in resolved.items() if isinstance(data, torch.Tensor)}
        resolved |= zip(tensors, memory.copy_tensors(list(tensors.values())), strict=True)
        self.planner = _ResolvedPlanner(lambda item: resolved[id(item)])

    def cancel(self) -> None:
        """Make ``write_files``, which runs in another thread, fail soon."""
        self.writer.cancelled.set()


def prepare_save(
    state: dict[str, Any], directory: Path, planner: SavePlanner, save_id: str
) -> PreparedSave:
    """Agree with all ranks on who writes which part of ``state``, as in torch's own save."""
    writer = HashingWriter(directory, save_id)
    metadata = None
    first = distributed.rank() == 0

    def plan_mine() -> SavePlan:
        planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        together, metadata = planner.create_global_plan(plans)
        check_objects(metadata)
        return writer.prepare_global_plan(together)

    with gc_paused():
        local_plan = collective_steps().reduce_scatter("plan", plan_mine, plan_all)
    plan = planner.finish_plan(local_plan)
    return PreparedSave(directory, writer, plan, _ResolvedPlanner(planner.resolve_data), metadata)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection: plans of many ranks are millions of live objects, and this halves the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_objects(metadata: Metadata) -> None:
    """Assert that every part of each sharded object is written; torch's planner checks tensors and duplicates."""
    written_parts: Counter[tuple[str, int]] = Counter()
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata) and "/shard_" in name:
            key, _, shard = name.rpartition("/shard_")
            written_parts[key, prod(int(size) for size in shard.partition("_")[2].split("."))] += 1
    missing = {
        key: parts - written for (key, parts), written in written_parts.items() if written != parts
    }
    assert not missing, f"objects of which parts are missing, and how many: {missing}"


def collective_steps() -> _DistWrapper:
    """Torch's steps over all ranks: one result on the first rank; if one rank fails, all do."""
    return _DistWrapper(None, distributed.is_initialized(), 0)


@contextmanager
def without_zip_checksums() -> Iterator[None]:
    """Do not write CRC-32 checksums: torch's reader ignores them, and the manifest's hash costs a tenth as much."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
