# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run for Prometheus, which reads them over HTTP while the run trains."""

from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import paths
from megatron.bridge.training.callbacks.observe.metrics import Metrics
from megatron.bridge.training.callbacks.observe.timing import PREFIX
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import import_optional

NAMESPACE = "megatron_bridge_"

GAUGES: dict[str, tuple[str, str, float]] = {
    "learning rate": ("learning_rate", "learning rate of the last step", 1),
    "grad norm": ("grad_norm", "gradient norm before clipping", 1),
    "params norm": ("params_norm", "norm of the trained weights", 1),
    "zeros in grad": ("zeros_in_grad", "zeros in the gradient", 1),
    "loss scale": ("loss_scale", "factor of the fp16 loss", 1),
    "step time": ("step_seconds", "mean time of a step", 1),
    "data wait": ("data_wait_seconds", "mean time of a step in which the slowest rank waits for data", 1),
    "tokens per second": ("tokens_per_second", "tokens per second of all processes", 1),
    "TFLOP/s per process": ("process_flops", "model FLOP/s of a process", 1e12),
    "MFU": ("mfu_ratio", "fraction of the device's peak", 1),
    "batch size": ("batch_samples", "samples of a step", 1),
    "consumed samples": ("consumed_samples", "training samples so far", 1),
    "consumed tokens": ("consumed_tokens", "training tokens so far", 1),
    "skipped steps": ("skipped_steps", "steps without an update so far", 1),
    "memory GB": ("memory_bytes", "memory in use, the maximum over ranks", 1e9),
    "peak memory GB": ("peak_memory_bytes", "peak memory, the maximum over ranks", 1e9),
    "reserved memory GB": ("reserved_memory_bytes", "memory of the allocator, the maximum over ranks", 1e9),
    "joules per step": ("step_joules", "energy of a step over all GPUs", 1),
    "watts per GPU": ("gpu_watts", "mean power of a GPU", 1),
}
"""Metric -> its name in Prometheus, what it means, and the factor to Prometheus' base unit."""


class PrometheusOutput:
    """A page at ``http://HOST:PORT/metrics`` with the last values, from a thread of the first rank."""

    def __init__(self, config: ConfigContainer) -> None:
        self._host, self._port = config.logger.prometheus_host, config.logger.prometheus_port
        self._save = config.checkpoint.save
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        self._client: Any = None
        self._registry: Any = None

    def open(self, step: int, train_iters: int) -> None:
        key = f"logger.prometheus_port={self._port}"
        self._client = import_optional("prometheus_client", key, "prometheus")
        self._registry = self._client.CollectorRegistry()
        self._gauge("step", "last step that was logged").set(step)
        self._gauge("train_iters", "step at which the run ends").set(train_iters)
        if self._save is not None:
            folder = Path(self._save)
            text = "step of the newest checkpoint; -1 before the first"
            self._gauge("checkpoint_step", text).set_function(lambda: _newest_checkpoint(folder))
            text = "seconds since 1970 at which the newest checkpoint was published; 0 before the first"
            self._gauge("checkpoint_timestamp_seconds", text).set_function(lambda: _published_at(folder))
        try:
            self._server, _ = self._client.start_http_server(self._port, self._host, registry=self._registry)
        except OSError as error:
            raise UserError(
                f"{key} cannot be opened on logger.prometheus_host={self._host} ({error.strerror or error}): "
                "choose another port or an address of this machine"
            ) from error
        print_rank_0(f"metrics for Prometheus: http://{self._host}:{self._port}/metrics")

    def write(self, step: int, kind: str, numbers: Metrics) -> None:
        self._gauge("step", "").set(step)
        for name, value in numbers.items():
            if name in GAUGES:
                metric, text, factor = GAUGES[name]
                self._gauge(metric, text).set(value * factor)
            elif name.startswith(PREFIX):
                timer = self._gauge("timer_seconds", "parts of a step", "part")
                timer.labels(name.removeprefix(PREFIX)).set(value)
            else:
                self._gauge("loss", "mean loss", "kind", "name").labels(kind, name).set(value)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        if name not in self._gauges:
            gauge = self._client.Gauge(f"{NAMESPACE}{name}", text, labels, registry=self._registry)
            self._gauges[name] = gauge
        return self._gauges[name]


def _newest_checkpoint(root: Path) -> float:
    try:
        found = paths.latest_iteration(root)
    except UserError:
        return -1  # the tracker is being replaced, or damaged, which the run reports when it reads it
    return -1 if found is None else found


def _published_at(root: Path) -> float:
    tracker = root / paths.TRACKER
    return tracker.stat().st_mtime if tracker.is_file() else 0.0
