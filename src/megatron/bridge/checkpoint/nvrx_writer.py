# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false
"""Write a checkpoint in a process of nvidia-resiliency-ext, from a copy in shared memory.

Its writer makes the same files as torch's and hashes nothing. But it takes the function that opens files, and the one
given here hashes what is written, so the manifest is as reliable as that of any other save.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import manifest
from megatron.bridge.checkpoint.async_writer import AsyncSaver, WriteHandle
from megatron.bridge.checkpoint.hashing_writer import (
    PreparedSave,
    WrittenFiles,
    without_zip_checksums,
)
from megatron.bridge.utils.processes import die_with_parent

POLL = 0.02  # seconds

# Of the save that goes on in the writing process.
_records: manifest.FileRecords = {}
_failures: list[OSError] = []


class NvrxAsyncSaver(AsyncSaver):
    """A save that is written by a separate process, without the GIL of the training process and with lower priority."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Any = None

    def reserve(self, size: int) -> None:
        """Start the process; the first save allocates memory, which is then kept."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async

        if filesystem_async._results_queue is None:
            # the package would start a process for its queue that dies with SIGTERM, and outlives a killed rank
            manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
            manager.start(_end_with_parent)
            filesystem_async._results_queue = manager.Queue()
        self._calls = core.AsyncCallsQueue(cpu_shm_mode=True, sigterm_timeout=1.0)
        self._calls.schedule_async_request(core.AsyncRequest(_end_with_parent, (), []))

    def begin(self, prepared: PreparedSave) -> WriteHandle:
        if self._calls is None:  # after ``abort``
            self.reserve(0)
        return _NvrxWrite(self._calls, prepared)

    def abort(self) -> None:
        """End the process, and with it this rank's save, if there is one."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
            FileSystemWriterAsync,
        )

        if self._calls is None:
            return
        if not self.busy and _is_running(self._calls):
            self._calls.maybe_finalize_async_calls(blocking=True, no_dist=True)
            self._calls.close()
        self._calls.close(abort=True)
        self._calls = None
        self._writing = None
        FileSystemWriterAsync.cleanup_tensor_caches()


class _NvrxWrite:
    """A save that the process writes."""

    def __init__(self, calls: Any, prepared: PreparedSave) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
            FileSystemWriterAsync,
        )

        self._calls = calls
        self._alive = True
        self._lost = False
        self._writer: Any = FileSystemWriterAsync(
            prepared.directory,
            thread_count=1,
            open_file=_open_hashing,
            use_cached_data_structure=True,
            use_cpu_shm_for_gpu_tensors=True,
        )
        self._writer.prepare_write_data(prepared.plan, prepared.planner)
        write, stage, arguments = self._writer.get_save_function_and_args()
        if write is None:  # all of this rank's state is written by others
            self._alive = False
            return
        _empty_queue(self._writer.results_queue)
        calls.schedule_async_request(
            AsyncRequest(_write_shards, (write, stage, arguments[0], arguments[2]), [])
        )

    def is_alive(self) -> bool:
        if self._alive:
            running = _is_running(self._calls)  # asked first: it may end right after its answer
            self._calls.maybe_finalize_async_calls(no_dist=True)
            if not self._calls.get_num_unfinalized_calls():
                self._alive = False
            elif not running:
                self._alive = False
                self._lost = True
        return self._alive

    def join(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (end is None or time.monotonic() < end):
            time.sleep(POLL)

    def outcome(self) -> WrittenFiles:
        if not self._writer.has_data_to_write:
            return WrittenFiles([], {})
        if self._lost:
            raise RuntimeError(
                "the process of nvidia-resiliency-ext that wrote the checkpoint was killed"
            )
        results = self._writer.retrieve_write_results()
        records, failures = self._writer.results_queue.get()
        if failures:
            raise failures[0]
        if not isinstance(results, list):
            raise RuntimeError(
                f"nvidia-resiliency-ext could not write the checkpoint: {results[0]}"
            )
        return WrittenFiles(results, records)

    def cancel(self) -> None:
        """Do nothing: ``NvrxAsyncSaver.abort`` ends the process."""


def _is_running(calls: Any) -> bool:
    return calls.persistent_caller is not None and calls.persistent_caller.process.is_alive()


def _empty_queue(queue: Any) -> None:
    """Drop the results of an aborted save."""
    while not queue.empty():
        queue.get()


def _end_with_parent() -> None:
    """End when the training process ends, but not by SIGTERM to the process group: the run then finishes saves."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _write_shards(
    write: Callable[..., None], stage: Callable[[], Any], rank: int, results: Any
) -> None:
    """Write as the package does; the records of the files follow its results."""
    _records.clear()
    _failures.clear()
    with without_zip_checksums():
        write(rank, stage(), results)
    results.put((dict(_records), list(_failures)))


@contextmanager
def _open_hashing(path: str, mode: str) -> Iterator[manifest.HashingStream]:
    assert mode == "wb", mode
    try:
        with manifest.hashing(Path(path), _records, Path(path).name) as stream:
            yield stream
    except OSError as error:  # the package keeps its text only
        _failures.append(OSError(error.errno, error.strerror, error.filename))
        raise
