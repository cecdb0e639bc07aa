# SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint in another process, by Megatron-Core's queue, while the training goes on.

The process is forked: it sees the memory as it was at that moment, and what the training changes from then on is
copied by the system page by page. So nothing is copied in advance but what lies on a device.
"""

import os
import pickle
import signal
from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

from megatron.bridge.checkpoint.collective import portable
from megatron.bridge.checkpoint.writer import Prepared, Written
from megatron.bridge.utils.processes import die_with_parent


class Background:
    """The saves that go on; all methods but ``abort`` are called on all ranks."""

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue()

    @property
    def busy(self) -> bool:
        """Whether a save has not been published yet."""
        return self._queue.get_num_unfinalized_calls() > 0

    def start(self, prepared: Prepared, finish: Callable[[Callable[[], Written]], None]) -> None:
        """Begin to write, and have ``finish`` called with the result when all ranks have written."""
        prepared.move_to_host()
        answer = os.memfd_create("checkpoint")  # a full disk must not take the message about it
        request = AsyncRequest(_write, (prepared, answer), [lambda: _finish(finish, answer)])
        self._queue.schedule_async_request(request)

    def poll(self, wait: bool = False) -> None:
        """Publish what has been written; with ``wait``, until nothing is left.

        Raises:
            CheckpointException: a rank could not write.
        """
        if self.busy:
            self._queue.maybe_finalize_async_calls(blocking=wait)

    def abort(self) -> None:
        """End the writing process of this rank; nothing is published."""
        for call in self._queue.async_calls:
            call.async_caller.close(abort=True)
        self._queue.async_calls.clear()


def _write(prepared: Prepared, answer: int) -> None:
    """In the forked process: write, and leave what was done, or why not, in memory that both share."""
    die_with_parent(signal.SIGKILL)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # launchers signal every process; only the training decides
    torch.set_num_threads(1)  # the other threads exist in the parent only
    try:
        outcome = prepared.write_files()
    except BaseException as error:  # raised in the parent
        outcome = portable(error)
    with os.fdopen(answer, "wb") as stream:
        pickle.dump(outcome, stream)


def _finish(finish: Callable[[Callable[[], Written]], None], answer: int) -> None:
    def outcome() -> Written:
        with os.fdopen(answer, "rb") as stream:
            stream.seek(0)
            content = stream.read()
        if not content:
            raise RuntimeError("the process that wrote the checkpoint was killed")
        written = pickle.loads(content)
        if isinstance(written, BaseException):
            raise written
        return written

    finish(outcome)
