# SPDX-License-Identifier: Apache-2.0
"""What happens at some steps: evaluation, garbage collection, and the end of a run."""

import gc

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.evaluation import evaluate, has_validation_data
from megatron.bridge.training.optim.optimizer import gather_params
from megatron.bridge.training.state import Run


class Evaluation(Callback):
    """Evaluates every ``validation.eval_interval`` steps and after the last step; on the test data at the end."""

    _evaluated_step: int | None = None

    def on_train_step_end(self, context: Run) -> None:
        if context.is_due(context.config.validation.eval_interval):
            self._validate(context)

    def on_train_end(self, context: Run) -> None:
        """Evaluate the final weights, unless this step was just evaluated; then evaluate on the test data."""
        if context.requeue:
            return  # these are not the final weights, and the remaining time is needed for saving
        if context.progress.step != self._evaluated_step:
            self._validate(context)
        train = context.config.train
        is_final = train.skip_train or context.progress.step >= train.train_iters
        if context.data.test is not None and is_final:
            evaluate(context, "test")

    def _validate(self, run: Run) -> None:
        if has_validation_data(run):
            evaluate(run)
            self._evaluated_step = run.progress.step


class ExitInterval(Callback):
    """Ends the run after a step whose number is a multiple of ``train.exit_interval``."""

    def on_train_step_end(self, context: Run) -> None:
        interval = context.config.train.exit_interval
        if context.is_due(interval):
            context.stop_reason = f"train.exit_interval={interval}"


class ParamGather(Callback):
    """Completes an overlapped parameter gather after the last step, so that the model can be used afterwards."""

    def on_train_end(self, context: Run) -> None:
        gather_params(context.model)


class GarbageCollection(Callback):
    """With ``train.manual_gc``, collects at fixed steps: automatic collections make ranks wait for each other."""

    _was_enabled = False

    def on_train_start(self, context: Run) -> None:
        if context.config.train.manual_gc:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()

    def on_train_step_end(self, context: Run) -> None:
        train = context.config.train
        if train.manual_gc and context.is_due(train.manual_gc_interval):
            gc.collect(1)

    def on_eval_end(self, context: Run) -> None:
        if context.config.train.manual_gc:
            gc.collect()  # an evaluation leaves iterators behind

    def close(self, context: Run) -> None:
        if context.config.train.manual_gc and self._was_enabled:
            gc.enable()
