# SPDX-License-Identifier: Apache-2.0
"""The spans of a run for OpenTelemetry, and its metrics."""

from typing import Any

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.callbacks.observe.metric_formats import METRIC_FORMATS
from megatron.bridge.training.callbacks.observe.metrics import PREFIX, Metrics
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.telemetry import Telemetry

NAMESPACE = "megatron_bridge."


class TelemetryOutput(Callback):
    """Sends a span for the run, each step and each evaluation, and the metrics of log lines, from the first rank."""

    def __init__(self, config: ConfigContainer) -> None:
        self._service = config.logger.otel_service_name or ""
        self._telemetry: Telemetry | None = None
        self._run_span: Any = None
        self._span: Any = None  # of the current step or evaluation

    # an output of metrics

    def open(self, step: int, train_iters: int) -> None:
        """Do nothing: the telemetry is started before the outputs."""

    def write(self, step: int, kind: str, numbers: Metrics) -> None:
        """Set the metrics, under the names that they have in Prometheus."""
        assert self._telemetry is not None, "training has started"
        self._telemetry.set_gauge(f"{NAMESPACE}step", step, {})
        for name, value in numbers.items():
            if name in METRIC_FORMATS:
                shown = METRIC_FORMATS[name]
                gauge = f"{NAMESPACE}{shown.gauge}"
                self._telemetry.set_gauge(gauge, value * shown.factor, {}, shown.meaning)
            elif name.startswith(PREFIX):
                part = {"part": name.removeprefix(PREFIX)}
                self._telemetry.set_gauge(f"{NAMESPACE}timer_seconds", value, part)
            else:
                self._telemetry.set_gauge(f"{NAMESPACE}loss", value, {"kind": kind, "name": name})

    # a callback

    def on_train_start(self, context: Run) -> None:
        """Start the span of the run."""
        if distributed.rank() != 0:
            return
        model = context.config.model
        described = {
            "world_size": distributed.world_size(),
            "tensor_parallel": model.tensor_model_parallel_size,
            "pipeline_parallel": model.pipeline_model_parallel_size,
            "context_parallel": model.context_parallel_size,
        }
        key = f"logger.otel_service_name={self._service}"
        self._telemetry = Telemetry(self._service, key, {})
        attributes = {f"{NAMESPACE}{name}": value for name, value in described.items()}
        attributes[f"{NAMESPACE}first_step"] = context.progress.step
        self._run_span = self._telemetry.start_span("run", attributes)

    def on_train_step_start(self, context: Run) -> None:
        self._start("train step", context.progress.step + 1)

    def on_train_step_end(self, context: Run) -> None:
        self._end()

    def on_eval_start(self, context: Run) -> None:
        self._start("evaluation", context.progress.step)

    def on_eval_end(self, context: Run) -> None:
        self._end()

    def on_test_start(self, context: Run) -> None:
        self._start("test", context.progress.step)

    def on_test_end(self, context: Run) -> None:
        self._end()

    def on_error(self, context: Run, error: BaseException) -> None:
        """Mark the run as failed."""
        if self._telemetry is not None:
            self._telemetry.fail_span(self._span or self._run_span, error)
            self._telemetry.fail_span(self._run_span, error)

    def close(self, context: Run | None = None) -> None:
        """End all spans and send what is left; it is called as a callback and as an output."""
        if self._telemetry is None or context is None:
            return
        self._end()
        self._run_span.end()
        self._telemetry.close()
        self._telemetry = None

    def _start(self, name: str, step: int) -> None:
        if self._telemetry is not None:
            attributes = {f"{NAMESPACE}step": step}
            self._span = self._telemetry.start_span(name, attributes, parent=self._run_span)

    def _end(self) -> None:
        if self._span is not None:
            self._span.end()
            self._span = None
