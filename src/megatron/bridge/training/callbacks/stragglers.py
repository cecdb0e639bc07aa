# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Which rank the others wait for, step by step."""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from megatron.core import utils

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import StragglerDetectionConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.console import console


class Stragglers(Callback):
    """Compares how long ranks take for data, forward and backward, until they meet to reduce gradients.

    Data-parallel ranks do the same work there and wait for nobody, so a slow one stands out. Ranks that compute
    one sample together (tensor, pipeline and context parallel ones) wait for each other on the way: of those, the
    whole group is named. Costs one synchronisation with the device a step.
    """

    def __init__(self, config: StragglerDetectionConfig) -> None:
        self._config = config
        self._started = 0.0
        self._seconds: list[float] = []

    def on_train_start(self, context: Run) -> None:
        """Take the time where gradients are about to be reduced."""
        hooks = cast(Any, utils).get_model_config(context.model[0])
        hooks.finalize_model_grads_func = self._noted(hooks.finalize_model_grads_func)

    def on_train_step_start(self, context: Run) -> None:
        """The step begins."""
        self._started = time.perf_counter()

    def _noted(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            self._seconds.append(time.perf_counter() - self._started)
            return reduce(*args, **kwargs)

        return noted

    def on_train_step_end(self, context: Run) -> None:
        """At the interval, compare and say who is slow."""
        if not context.is_due(self._config.interval):
            return
        means = dist.all_gather_object((statistics.fmean(self._seconds), socket.gethostname()))
        self._seconds = []
        for sentence in slow_ranks(means, self._config.factor):
            console().print(f"step {context.progress.step}: {sentence}", markup=False)


def slow_ranks(means: Sequence[tuple[float, str]], factor: float) -> list[str]:
    """A sentence for each rank that takes ``factor`` times the median or more.

    Args:
        means: Seconds and host by rank.
        factor: What is slow.

    Example:
        >>> slow_ranks([(0.1, "a"), (0.1, "a"), (0.4, "b")], 1.5)
        ['rank 2 on b is slow: 0.400 s of its own a step, 4.0 times the median']
    """
    usual = statistics.median_low(seconds for seconds, _ in means)
    return [
        f"rank {rank} on {host} is slow: {seconds:.3f} s of its own a step, {seconds / usual:.1f} times the median"
        for rank, (seconds, host) in enumerate(means)
        if seconds >= factor * usual and seconds > usual
    ]
