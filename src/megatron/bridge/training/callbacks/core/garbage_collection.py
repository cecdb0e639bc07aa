# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collection at the same step on all ranks."""

import gc

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import TrainingConfig
from megatron.bridge.training.state import Run


class GarbageCollection(Callback):
    """With ``train.manual_gc``, collects at fixed steps: automatic collections make ranks wait for each other."""

    def __init__(self, train: TrainingConfig) -> None:
        self._manual = train.manual_gc
        self._interval = train.manual_gc_interval
        self._was_enabled = gc.isenabled()

    def on_train_start(self, context: Run) -> None:
        if self._manual:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()

    def on_train_step_end(self, context: Run) -> None:
        if self._manual and context.is_due(self._interval):
            gc.collect(1)

    def on_eval_end(self, context: Run) -> None:
        if self._manual:
            gc.collect()  # an evaluation leaves iterators behind

    def close(self, context: Run) -> None:
        if self._manual and self._was_enabled:
            gc.enable()
