# SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint in a thread, from a copy in the host's memory, while the training goes on.

The caller waits for the copy only. Writing and hashing go on without Python's lock, a few megabytes at a time, so
the training is not held up; a forked process would hold it up by copying each page that an update touches, and
is unsafe with other threads or a GPU.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from megatron.bridge.checkpoint.collective import forget_frames, portable
from megatron.bridge.checkpoint.hashing_writer import PreparedSave, WrittenFiles
from megatron.bridge.checkpoint.host_buffers import HostBuffer
from megatron.bridge.utils import distributed

Publish = Callable[[Callable[[], WrittenFiles]], None]

# How long a save that is given up may need to notice; it does so after every piece of a file.
PATIENCE = 10.0


class WriteHandle(Protocol):
    """What writes the files of this rank, meanwhile."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until it does not, or for ``timeout`` seconds."""
        ...

    def outcome(self) -> WrittenFiles:
        """What was written, once that is over."""
        ...

    def cancel(self) -> None: ...


class AsyncSaver:
    """The save that goes on; all methods but ``reserve`` and ``abort`` are called on all ranks."""

    def __init__(self) -> None:
        self._memory = HostBuffer()
        self._writing: tuple[WriteHandle, Publish] | None = None

    @property
    def busy(self) -> bool:
        """Whether a save has not been published yet."""
        return self._writing is not None

    def reserve(self, size: int) -> None:
        """Make ``size`` bytes ready for copies of what this rank writes."""
        self._memory.reserve(size)

    def start(self, prepared: PreparedSave, finish: Publish) -> None:
        """Begin to write, and have ``finish`` called with the result when all ranks have written."""
        assert not self.busy, "the save before is not published yet"
        self._writing = self.begin(prepared), finish

    def begin(self, prepared: PreparedSave) -> WriteHandle:
        prepared.copy_to(self._memory)
        writing = _WriterThread(prepared)
        writing.start()
        return writing

    def poll(self, wait: bool = False) -> None:
        """Publish what has been written; with ``wait``, as soon as it has been. Raises what a rank could not write."""
        if self._writing is None:
            return
        writing, finish = self._writing
        if wait:
            writing.join()
        if wait or distributed.all_ranks_agree(not writing.is_alive()):
            self._writing = None
            finish(writing.outcome)

    def abort(self) -> None:
        """Give up the save of this rank; it is not published."""
        if self._writing is not None:
            writing, _ = self._writing
            writing.cancel()
            writing.join(PATIENCE)
            self._writing = None


class _WriterThread(threading.Thread):
    """Writes the files of this rank, and keeps what was written, or why not."""

    def __init__(self, prepared: PreparedSave) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.cancel = prepared.cancel
        self._prepared = prepared
        self._written: WrittenFiles | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._written = self._prepared.write_files()
        except BaseException as error:  # raised by the training, where ``outcome`` is asked for
            forget_frames(error)
            self._error = portable(error)

    def outcome(self) -> WrittenFiles:
        """What was written, once the thread has ended."""
        if self._error is not None:
            raise self._error
        assert self._written is not None, "it is still writing"
        return self._written
