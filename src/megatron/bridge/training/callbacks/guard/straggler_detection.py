# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Detect ranks that are slower than the others."""

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
from megatron.bridge.utils import distributed
from megatron.bridge.utils.console import print_rank_0


class StragglerDetection(Callback):
    """Compares the time from the start of a step to the reduction of its gradients between ranks.

    Data-parallel ranks do the same work in that time and do not wait for each other, so a slow rank stands out.
    Tensor-, pipeline- and context-parallel ranks wait for each other: all ranks of a slow group are named. The
    comparison costs one device synchronization per step.
    """

    def __init__(self, config: StragglerDetectionConfig) -> None:
        self._config = config
        self._started = 0.0
        self._seconds: list[float] = []

    def on_train_start(self, context: Run) -> None:
        hooks = cast(Any, utils).get_model_config(context.model[0])
        hooks.finalize_model_grads_func = self._timed(hooks.finalize_model_grads_func)

    def on_train_step_start(self, context: Run) -> None:
        self._started = time.perf_counter()

    def _timed(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            self._seconds.append(time.perf_counter() - self._started)
            return reduce(*args, **kwargs)

        return timed

    def on_train_step_end(self, context: Run) -> None:
        """At the interval, print which ranks are slow."""
        if not context.is_due(self._config.interval):
            return
        means = distributed.all_gather_object((statistics.fmean(self._seconds), socket.gethostname()))
        self._seconds = []
        for sentence in slow_ranks(means, self._config.factor):
            print_rank_0(f"step {context.progress.step}: {sentence}")


def slow_ranks(means: Sequence[tuple[float, str]], factor: float) -> list[str]:
    """One message for each rank whose mean seconds are at least ``factor`` times the median; ``means`` name hosts.

    Example:
        >>> slow_ranks([(0.1, "a"), (0.1, "a"), (0.4, "b")], 1.5)
        ['rank 2 on b is slow: 0.400 s per step before it waits for others, 4.0 times the median']
    """
    usual = statistics.median_low(seconds for seconds, _ in means)
    return [
        f"rank {rank} on {host} is slow: {seconds:.3f} s per step before it waits for others, "
        f"{seconds / usual:.1f} times the median"
        for rank, (seconds, host) in enumerate(means)
        if seconds >= factor * usual and seconds > usual
    ]
