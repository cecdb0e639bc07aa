# SPDX-License-Identifier: Apache-2.0
"""Save a run that is preempted, and end it with an exit code that requests a restart."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.processes import die_with_parent

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h, a temporary failure: the same command may succeed later."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_TIME_LIMIT = 1000  # above every signal's number
_PROCESS_START = time.monotonic()  # approximately; a process may set up a run more than once


class Preemption(Callback):
    """Ends the run after a step in which any rank received a signal or ``train.exit_duration_in_mins`` was over.

    Ranks agree with one all-reduce at the end of each step, so all of them save the same step. Under torchrun a
    rank treats the death of the launcher like SIGTERM: otherwise it would keep running and keep the folder
    locked.
    """

    def __init__(self, config: ConfigContainer) -> None:
        train = config.train
        self._minutes = train.exit_duration_in_mins
        self._handles = train.exit_signal_handler and config.checkpoint.save is not None
        self._caught = 0
        self._before: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    def on_train_start(self, context: Run) -> None:
        """Install the signal handlers, which only the main thread can do."""
        if self._handles and threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._catch) for signum in SIGNALS}
            if "TORCHELASTIC_RUN_ID" in os.environ:
                die_with_parent(signal.SIGTERM)

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        self._caught = signum

    def on_train_step_end(self, context: Run) -> None:
        if not self._handles and self._minutes is None:
            return
        late = self._minutes is not None and time.monotonic() - _PROCESS_START > 60 * self._minutes
        reason = int(distributed.reduce_numbers([_TIME_LIMIT if late else self._caught], "MAX")[0])
        if reason and context.progress.step < context.config.train.train_iters:
            what = "train.exit_duration_in_mins" if reason == _TIME_LIMIT else signal.Signals(reason).name
            context.stop_reason = f"{what}: saved, exit code {REQUEUE_EXIT_CODE} requests a restart"
            context.requeue = True

    def close(self, context: Run) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
