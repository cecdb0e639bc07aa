# SPDX-License-Identifier: Apache-2.0
"""The best evaluation of a run: its checkpoint is kept, and the run ends when no better one comes."""

import math
from typing import Any

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.state import Run
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError, did_you_mean


class BestModel(Callback):
    """Remembers the best evaluation, for ``checkpoint.keep_best`` and ``validation.patience``.

    The losses of an evaluation are equal on all ranks, so all ranks decide alike.
    """

    def __init__(self) -> None:
        self._metric: str | None = None
        self._best: float | None = None
        self._best_step: int | None = None
        self._last_step: int | None = None
        self._without_improvement = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self._metric,
            "best": self._best,
            "best_step": self._best_step,
            "last_step": self._last_step,
            "without_improvement": self._without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._metric = state["metric"]
        self._best = state["best"]
        self._best_step = state["best_step"]
        self._last_step = state["last_step"]
        self._without_improvement = state["without_improvement"]

    def on_train_start(self, context: Run) -> None:
        """Go on from the best evaluation of the checkpoint; a run that had ended early ends again."""
        context.best_step = self._best_step
        self._stop_if_patience_is_over(context)

    def on_eval_end(self, context: Run) -> None:
        """Compare the evaluation with the best one."""
        step = context.progress.step
        # a run that is interrupted is evaluated as well, where one that goes on is not
        is_regular = context.is_due(context.config.validation.eval_interval)
        is_last = step >= context.config.train.train_iters
        if step == self._last_step or not (is_regular or is_last):
            return
        self._last_step = step
        value = self._value_of(context)
        if self._is_better(context, value):
            self._best = value
            self._best_step = step
            self._without_improvement = 0
            context.best_step = step
        else:
            self._without_improvement += 1

    def on_train_step_end(self, context: Run) -> None:
        if self._last_step == context.progress.step:
            self._stop_if_patience_is_over(context)

    def on_train_end(self, context: Run) -> None:
        if self._best is not None:
            print_rank_0(f"best {self._metric}: {self._best:.6g} at step {self._best_step}")

    def _stop_if_patience_is_over(self, context: Run) -> None:
        patience = context.config.validation.patience
        if patience is not None and self._without_improvement >= patience:
            context.stop_reason = (
                f"validation.patience={patience}: {self._metric} was best ({self._best:.6g}) at step "
                f"{self._best_step}"
            )

    def _value_of(self, context: Run) -> float:
        losses = context.total_loss_dict or {}
        metric = context.config.validation.metric or next(iter(losses))
        if metric not in losses:
            raise UserError(
                f"validation.metric={metric} is not among what an evaluation reports ({', '.join(losses)})"
                f"{did_you_mean(metric, losses)}"
            )
        if self._metric not in (None, metric):
            print_rank_0(
                f"note: validation.metric is {metric} now and was {self._metric}: its best value counts from here"
            )
            self._best = None
            self._without_improvement = 0
        self._metric = metric
        return losses[metric].item()

    def _is_better(self, context: Run, value: float) -> bool:
        if math.isnan(value):
            return False
        if self._best is None:
            return True
        validation = context.config.validation
        gain = self._best - value if validation.metric_mode == "min" else value - self._best
        return gain > validation.min_delta
