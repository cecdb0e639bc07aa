# SPDX-License-Identifier: Apache-2.0
"""Save a run that is preempted or interrupted, and end it with an exit code that says so."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.processes import die_with_parent

REQUEUE_EXIT_CODE = (
    75  # EX_TEMPFAIL of sysexits.h, a temporary failure: the same command may succeed later
)

INTERRUPT_EXIT_CODE = 128 + signal.SIGINT  # what shells report for a command that Ctrl-C ended

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_FORWARDED = (
    2.0  # seconds; torchrun, which Ctrl-C reaches too, sends another SIGINT to its processes
)
_TIME_LIMIT = 1000  # above every signal's number
_PROCESS_START = time.monotonic()  # approximately; a process may set up a run more than once


class Preemption(Callback):
    """Ends the run after a step in which any rank received a signal or ``train.exit_duration_in_mins`` was over.

    Ctrl-C (SIGINT) does the same; pressed again, it ends the process at once.

    Ranks agree with one all-reduce at the end of each step, so all of them save the same step. Under torchrun a
    rank treats the death of the launcher like SIGTERM: otherwise it would keep running and keep the folder
    locked. With ``later`` it looks at the answer after the next step, so that a GPU never waits for the process to
    queue its work; None does so where there are several GPUs.
    """

    def __init__(self, config: ConfigContainer, later: bool | None = None) -> None:
        self._later = (has_cuda() and distributed.world_size() > 1) if later is None else later
        self._pending: distributed.PendingMaximum | None = None
        train = config.train
        self._minutes = train.exit_duration_in_mins
        self._handles = train.exit_signal_handler and config.checkpoint.save is not None
        self._caught = 0
        self._interrupted = 0.0
        self._before: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    def on_train_start(self, context: Run) -> None:
        """Install the signal handlers, which only the main thread can do."""
        if self._handles and threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._catch) for signum in SIGNALS}
            if "TORCHELASTIC_RUN_ID" in os.environ:
                die_with_parent(signal.SIGTERM)

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and not self._caught and distributed.rank() == 0:
            # print is not safe in a signal handler
            os.write(
                2,
                b"\nCtrl-C: saving after this step; press it again to end at once without saving\n",
            )
        if (
            signum == self._caught == signal.SIGINT
            and time.monotonic() - self._interrupted > _FORWARDED
        ):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self._caught = signum
        self._interrupted = time.monotonic()

    def on_train_step_end(self, context: Run) -> None:
        if not self._handles and self._minutes is None:
            return
        late = self._minutes is not None and time.monotonic() - _PROCESS_START > 60 * self._minutes
        reason = self._largest(_TIME_LIMIT if late else self._caught)
        if reason and context.progress.step < context.config.train.train_iters:
            setting = (
                "train.exit_duration_in_mins"
                if reason == _TIME_LIMIT
                else signal.Signals(reason).name
            )
            context.stop_reason = (
                f"{setting}: saved, exit code {REQUEUE_EXIT_CODE} requests a restart"
            )
            context.requeue = True
            if reason == signal.SIGINT:
                context.stop_reason = "Ctrl-C: saved; the same command continues the run"
                context.exit_code = INTERRUPT_EXIT_CODE

    def _largest(self, reason: int) -> int:
        """The reason of any rank: the one of now or, with ``later``, the one of the step before."""
        if not self._later:
            return int(distributed.reduce_numbers([reason], "MAX")[0])
        before = self._pending
        self._pending = distributed.PendingMaximum(reason)
        return 0 if before is None else int(before.wait())

    def close(self, context: Run) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
