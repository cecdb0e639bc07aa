# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false, reportMissingImports=false
"""Slow GPUs, by nvidia-resiliency-ext's detector, which times each kernel; ``straggler`` works everywhere.

The one place that imports its ``straggler``.
"""

from contextlib import AbstractContextManager
from typing import Any

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import NVRxStragglerDetectionConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

SECTION = "train step"


class NVRxStragglers(Callback):
    """Compares how fast GPUs run the kernels of a step: with each other, and with what each has done before.

    Raises:
        UserError: nvidia-resiliency-ext is missing.
    """

    def __init__(self, config: NVRxStragglerDetectionConfig) -> None:
        try:
            from nvidia_resiliency_ext.attribution.straggler import Detector
        except ImportError as error:
            raise UserError(
                f"nvrx_straggler is set, but nvidia-resiliency-ext cannot be imported ({error}): install the "
                "extra `resiliency`, or unset nvrx_straggler"
            ) from error
        self._config = config
        self._detector: Any = Detector
        self._section: AbstractContextManager[None] | None = None

    def on_train_start(self, context: Run) -> None:
        """Hook into the driver's tracing of kernels."""
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
        """Trace from here on."""
        section: AbstractContextManager[None] = self._detector.detection_section(SECTION, profile_cuda=True)
        section.__enter__()
        self._section = section

    def on_train_step_end(self, context: Run) -> None:
        """To here; if it is time, compare and say who is slow."""
        assert self._section is not None, "the step has not begun"
        self._section.__exit__(None, None, None)
        self._section = None
        report = self._detector.generate_report_if_interval_elapsed()
        if not self._detector.is_interval_elapsed():
            return
        sentences = dist.broadcast_object(self._sentences(report) if dist.rank() == 0 else [])
        for sentence in sentences:
            console().print(f"step {context.progress.step}: {sentence}", markup=False)
        if sentences and self._config.stop_if_detected:
            context.stop_reason = f"a slow GPU: {sentences[0]}"
            context.requeue = True

    def _sentences(self, report: Any) -> list[str]:
        found = report.identify_stragglers(
            gpu_rel_threshold=self._config.gpu_relative_perf_threshold,
            gpu_indiv_threshold=self._config.gpu_individual_perf_threshold,
        )
        return [
            f"the GPU of rank {straggler.rank} on {straggler.node} is slow, compared with {what}"
            for kind, what in (
                ("straggler_gpus_relative", "the others"),
                ("straggler_gpus_individual", "what it was"),
            )
            for straggler in sorted(found[kind], key=lambda straggler: straggler.rank)
        ]

    def close(self, context: Run) -> None:
        """Leave the driver alone."""
        if self._detector.initialized:
            self._detector.shutdown()
