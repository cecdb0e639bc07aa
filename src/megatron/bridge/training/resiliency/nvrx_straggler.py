# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false, reportMissingImports=false
"""Detect slow GPUs with nvidia-resiliency-ext, which times each kernel; ``straggler`` works without it.

This is the only module that imports ``nvidia_resiliency_ext.attribution.straggler``.
"""

from contextlib import AbstractContextManager
from typing import Any

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import NVRxStragglerDetectionConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.optional_imports import import_optional

SECTION = "train step"


class NVRxStragglerDetection(Callback):
    """Compares the kernel times of each GPU with those of the other GPUs, and with its own earlier times."""

    def __init__(self, config: NVRxStragglerDetectionConfig) -> None:
        self._config = config
        module = import_optional("nvidia_resiliency_ext.attribution.straggler", "nvrx_straggler", "resiliency")
        self._detector: Any = module.Detector
        self._section: AbstractContextManager[None] | None = None

    def on_train_start(self, context: Run) -> None:
        wanted = {
            "relative_perf_scores": self._config.calc_relative_gpu_perf,
            "individual_perf_scores": self._config.calc_individual_gpu_perf,
        }
        self._detector.initialize(
            scores_to_compute=[name for name, is_wanted in wanted.items() if is_wanted],
            gather_on_rank0=True,
            profiling_interval=self._config.profiling_interval,
            report_time_interval=self._config.report_time_interval,
        )

    def on_train_step_start(self, context: Run) -> None:
        section: AbstractContextManager[None] = self._detector.detection_section(SECTION, profile_cuda=True)
        section.__enter__()
        self._section = section

    def on_train_step_end(self, context: Run) -> None:
        """Print which GPUs are slow, at the interval."""
        assert self._section is not None, "the step has not started"
        self._section.__exit__(None, None, None)
        self._section = None
        report = self._detector.generate_report_if_interval_elapsed()
        if not self._detector.is_interval_elapsed():
            return
        found = distributed.broadcast_object(self._slow_gpus(report) if distributed.rank() == 0 else [])
        for message in found:
            print_rank_0(f"step {context.progress.step}: {message}")
        if found and self._config.stop_if_detected:
            context.stop_reason = f"a slow GPU: {found[0]}"
            context.requeue = True

    def _slow_gpus(self, report: Any) -> list[str]:
        found = report.identify_stragglers(
            gpu_rel_threshold=self._config.gpu_relative_perf_threshold,
            gpu_indiv_threshold=self._config.gpu_individual_perf_threshold,
        )
        return [
            f"the GPU of rank {straggler.rank} on {straggler.node} is slow compared with {what}"
            for kind, what in (
                ("straggler_gpus_relative", "the other GPUs"),
                ("straggler_gpus_individual", "its earlier speed"),
            )
            for straggler in sorted(found[kind], key=lambda straggler: straggler.rank)
        ]

    def close(self, context: Run) -> None:
        if self._detector.initialized:
            self._detector.shutdown()
