# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collection, at the same time on all ranks."""

import gc

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import TrainingConfig
from megatron.bridge.training.state import Run


class GarbageCollection(Callback):
    """With ``train.manual_gc``: no automatic collections, which would make ranks wait for each other in turn."""

    def __init__(self, train: TrainingConfig) -> None:
        self._manual = train.manual_gc
        self._interval = train.manual_gc_interval
        self._was_enabled = gc.isenabled()

    def on_train_start(self, context: Run) -> None:
        """Switch the automatic one off."""
        if self._manual:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()

    def on_train_step_end(self, context: Run) -> None:
        """Collect the young generations, at the interval."""
        if self._manual and context.is_due(self._interval):
            gc.collect(1)

    def on_eval_end(self, context: Run) -> None:
        """Collect: an evaluation leaves iterators behind."""
        if self._manual:
            gc.collect()

    def close(self, context: Run) -> None:
        """Leave the process as it was."""
        if self._manual and self._was_enabled:
            gc.enable()
