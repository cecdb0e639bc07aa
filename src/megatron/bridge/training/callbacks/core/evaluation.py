# SPDX-License-Identifier: Apache-2.0
"""When a run is evaluated on held-out data."""

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.evaluation import evaluate
from megatron.bridge.training.state import Run


class Evaluation(Callback):
    """Evaluates every ``validation.eval_interval`` steps and after the last step; on the test data at the end."""

    def __init__(self, config: ConfigContainer) -> None:
        self._interval = config.validation.eval_interval
        self._train_iters = config.train.train_iters
        self._evaluated_step: int | None = None

    def on_train_step_end(self, context: Run) -> None:
        if context.is_due(self._interval):
            self._validate(context)

    def on_train_end(self, context: Run) -> None:
        """Evaluate the final weights, unless this step was just evaluated; then evaluate on the test data."""
        if context.requeue:
            return  # these are not the final weights, and the remaining time is needed for saving
        if context.progress.step != self._evaluated_step:
            self._validate(context)
        if context.data.test is not None and context.progress.step >= self._train_iters:
            evaluate(context, "test")

    def _validate(self, run: Run) -> None:
        if run.data.valid is not None:
            evaluate(run)
            self._evaluated_step = run.progress.step
