# SPDX-License-Identifier: Apache-2.0
"""A run that is told to leave saves, and ends with an exit code that asks to be started again."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import torch

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.processes import die_with_parent

# What sysexits.h calls a temporary failure: the same command may succeed later.
REQUEUE = 75

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_TIME = 1000  # above every signal's number
_STARTED = time.monotonic()  # nearly that of the process, which may set up a run more than once


class Preemption(Callback):
    """Ends the run after the step in which a signal reached any rank, or in which its time was over.

    Ranks agree at the end of each step, by one number; so all save the same step. Started by torchrun, a rank also
    takes the death of the launcher for SIGTERM, or it would go on unseen and keep the folder locked.
    """

    def __init__(self, config: ConfigContainer) -> None:
        train = config.train
        self._minutes = train.exit_duration_in_mins
        self._handles = train.exit_signal_handler and config.checkpoint.save is not None
        self._caught = 0
        self._before: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    def on_train_start(self, context: Run) -> None:
        """Listen; only the main thread can."""
        if self._handles and threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._catch) for signum in SIGNALS}
            if "TORCHELASTIC_RUN_ID" in os.environ:
                die_with_parent(signal.SIGTERM)

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        self._caught = signum

    def on_train_step_end(self, context: Run) -> None:
        """Ask the loop to stop, on all ranks at once."""
        if not self._handles and self._minutes is None:
            return
        reason = _largest(_TIME if self._time_is_over() else self._caught)
        if reason and context.progress.step < context.config.train.train_iters:
            what = "train.exit_duration_in_mins" if reason == _TIME else signal.Signals(reason).name
            context.stop_reason = f"{what}: saved, exit code {REQUEUE} asks to be started again"
            context.requeue = True

    def _time_is_over(self) -> bool:
        return self._minutes is not None and time.monotonic() - _STARTED > 60 * self._minutes

    def close(self, context: Run) -> None:
        """Leave the signals as they were."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}


def _largest(number: int) -> int:
    """The largest number of all ranks."""
    if dist.world_size() == 1:
        return number
    shared = torch.tensor([number], dtype=torch.int32, device=torch.cuda.current_device())
    cast(Any, torch.distributed).all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return int(shared.item())
