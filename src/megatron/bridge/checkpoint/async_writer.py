# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint in a thread, from a copy in host memory, while training continues.

Training waits only for the copy. Writing and hashing release the GIL for a few megabytes at a time, so training is not
slowed down. A forked process would slow it down, because each page that an update touches is copied, and forking is
unsafe with other threads or a GPU.
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
    """This rank's part of a save that is being written."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until it is written, at most ``timeout`` seconds."""
        ...

    def outcome(self) -> WrittenFiles:
        """What was written; call it after ``join``."""
        ...

    def cancel(self) -> None: ...


class AsyncSaver:
    """A background save; all ranks must call its methods, except ``reserve`` and ``abort``."""

    def __init__(self) -> None:
        self._memory = HostBuffer()
        self._writing: tuple[WriteHandle, Publish] | None = None

    @property
    def busy(self) -> bool:
        """Whether a save has not been published yet."""
        return self._writing is not None

    def reserve(self, size: int) -> None:
        """Allocate ``size`` bytes for copies of what this rank writes."""
        self._memory.reserve(size)

    def start(self, prepared: PreparedSave, finish: Publish) -> None:
        """Start to write; ``finish`` is called with the result when all ranks have written."""
        assert not self.busy, "the save before is not published yet"
        self._writing = self.begin(prepared), finish

    def begin(self, prepared: PreparedSave) -> WriteHandle:
        prepared.copy_to(self._memory)
        writing = _WriterThread(prepared)
        writing.start()
        return writing

    def poll(self, wait: bool = False) -> None:
        """Publish the save if all ranks have written it, or ``wait`` until they have; raises if one failed."""
        if self._writing is None:
            return
        writing, finish = self._writing
        if wait:
            writing.join()
        if wait or distributed.all_ranks_agree(not writing.is_alive()):
            self._writing = None
            finish(writing.outcome)

    def abort(self) -> None:
        """Give up this rank's part of the save, which is then not published."""
        if self._writing is not None:
            writing, _ = self._writing
            writing.cancel()
            writing.join(PATIENCE)
            self._writing = None


class _WriterThread(threading.Thread):
    """Writes the files of this rank, and keeps the result or the error."""

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
        """What was written; call it after the thread has ended."""
        if self._error is not None:
            raise self._error
        assert self._written is not None, "it is still writing"
        return self._written
