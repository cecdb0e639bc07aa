# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false, reportMissingImports=false
"""Detect ranks that are slower than the others: on any hardware, or each GPU's kernels with nvidia-resiliency-ext.

This is the only module that imports ``nvidia_resiliency_ext.attribution.straggler``.
"""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from megatron.core import utils

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import NVRxStragglerDetectionConfig, StragglerDetectionConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.optional_imports import import_optional


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
        hooks.finalize_model_grads_func = partial(self._time, hooks.finalize_model_grads_func)

    def on_train_step_start(self, context: Run) -> None:
        self._started = time.perf_counter()

    def _time(self, reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        self._seconds.append(time.perf_counter() - self._started)
        return reduce(*args, **kwargs)

    def on_train_step_end(self, context: Run) -> None:
        """At the interval, print which ranks are slow."""
        if not context.is_due(self._config.interval):
            return
        means = distributed.all_gather_object(
            (statistics.fmean(self._seconds), socket.gethostname())
        )
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


SECTION = "train step"


class NVRxStragglerDetection(Callback):
    """Compares the kernel times of each GPU with those of the other GPUs, and with its own earlier times."""

    def __init__(self, config: NVRxStragglerDetectionConfig) -> None:
        self._config = config
        module = import_optional(
            "nvidia_resiliency_ext.attribution.straggler", "nvrx_straggler", "resiliency"
        )
        self._detector: Any = module.Detector
        self._section = ExitStack()

    def on_train_start(self, context: Run) -> None:
        scores = {
            "relative_perf_scores": self._config.calc_relative_gpu_perf,
            "individual_perf_scores": self._config.calc_individual_gpu_perf,
        }
        self._detector.initialize(
            scores_to_compute=[name for name, is_wanted in scores.items() if is_wanted],
            gather_on_rank0=True,
            profiling_interval=self._config.profiling_interval,
            report_time_interval=self._config.report_time_interval,
        )

    def on_train_step_start(self, context: Run) -> None:
        self._section.enter_context(self._detector.detection_section(SECTION, profile_cuda=True))

    def on_train_step_end(self, context: Run) -> None:
        """Print which GPUs are slow, at the interval."""
        self._section.close()
        report = self._detector.generate_report_if_interval_elapsed()
        if not self._detector.is_interval_elapsed():
            return
        slow_gpus = distributed.broadcast_object(
            self._slow_gpus(report) if distributed.rank() == 0 else []
        )
        for message in slow_gpus:
            print_rank_0(f"step {context.progress.step}: {message}")
        if slow_gpus and self._config.stop_if_detected:
            context.stop_reason = f"a slow GPU: {slow_gpus[0]}"
            context.requeue = True

    def _slow_gpus(self, report: Any) -> list[str]:
        stragglers = report.identify_stragglers(
            gpu_rel_threshold=self._config.gpu_relative_perf_threshold,
            gpu_indiv_threshold=self._config.gpu_individual_perf_threshold,
        )
        return [
            f"the GPU of rank {straggler.rank} on {straggler.node} is slow compared with {reference}"
            for kind, reference in (
                ("straggler_gpus_relative", "the other GPUs"),
                ("straggler_gpus_individual", "its earlier speed"),
            )
            for straggler in sorted(stragglers[kind], key=lambda straggler: straggler.rank)
        ]

    def close(self, context: Run) -> None:
        if self._detector.initialized:
            self._detector.shutdown()
