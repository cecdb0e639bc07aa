# SPDX-License-Identifier: Apache-2.0
"""Outputs for the metrics of a run: the console, ``metrics.jsonl``, TensorBoard, trackers and Prometheus."""

import json
import time
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from megatron.bridge.checkpoint import paths
from megatron.bridge.training.callbacks.observe.metric_formats import METRIC_FORMATS
from megatron.bridge.training.callbacks.observe.metrics import PREFIX, Metrics
from megatron.bridge.training.callbacks.observe.trackers import trackers
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils import json_lines
from megatron.bridge.utils.atomic import refuse_unwritable, write_text
from megatron.bridge.utils.console import console, print_rank_0
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.loss_curves import METRICS
from megatron.bridge.utils.optional_imports import import_optional
from megatron.bridge.utils.run_status import remaining

if TYPE_CHECKING:
    from rich.live import Live


class MetricsOutput(Protocol):
    """A destination of metrics, used on the first rank."""

    def open(self, step: int, train_iters: int) -> None:
        """Start, or resume after ``step`` of ``train_iters``."""

    def write(self, step: int, kind: str, numbers: Metrics) -> None:
        """Write the metrics of ``kind`` (train, validation, test) after ``step``."""

    def close(self) -> None:
        """Flush and release resources; called once, also after an error and before ``open``."""


def outputs(config: ConfigContainer) -> list[MetricsOutput]:
    chosen: list[MetricsOutput] = [ConsoleOutput()]
    if config.logger.log_dir:
        chosen.append(JsonLinesOutput(Path(config.logger.log_dir) / METRICS))
    if config.logger.tensorboard_dir:
        chosen.append(TensorBoardOutput(config.logger.tensorboard_dir))
    chosen.extend(trackers(config))
    if config.logger.prometheus_port is not None:
        chosen.append(PrometheusOutput(config))
    return chosen


class ConsoleOutput:
    """Plain lines in a log; in a terminal one live line for training, and one line for each evaluation."""

    def __init__(self) -> None:
        self._console = console()
        self._live: Live | None = None
        self._train_iters = 0
        self._first_step = 0
        self._started = 0.0

    def open(self, step: int, train_iters: int) -> None:
        self._first_step = step
        self._train_iters = train_iters
        self._started = time.monotonic()
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()

    def write(self, step: int, kind: str, numbers: Metrics) -> None:
        if kind != "train":
            shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
            self._console.print(f"{kind} after step {step}: {shown}", markup=False)
            return
        line = f"step {step}/{self._train_iters}  {_train_line(numbers)}  {self._remaining(step)}"
        lines = "\n".join(filter(None, (line, _times_line(numbers))))
        if self._live is None:
            self._console.print(lines, markup=False)
        else:
            from rich.text import Text

            # a narrow terminal wraps the line instead of cutting its end
            self._live.update(Text(lines, no_wrap=False, overflow="fold"), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _remaining(self, step: int) -> str:
        """Estimated time to the last step, at the average speed so far, including the time between steps."""
        per_step = (time.monotonic() - self._started) / max(step - self._first_step, 1)
        return remaining(
            timedelta(seconds=round(per_step * (self._train_iters - step))), datetime.now()
        )


_NOTABLE_WAIT = 0.05  # fraction of the step time
_SHORTEST_SHOWN = 0.05  # milliseconds; shorter times would be shown as 0.0


def _train_line(numbers: Metrics) -> str:
    words = [
        f"{name} {value:.4f}"
        for name, value in numbers.items()
        if name not in METRIC_FORMATS and not name.startswith(PREFIX)
    ]
    for name, shown in METRIC_FORMATS.items():
        is_zero_skipped = name == "skipped steps" and not numbers.get(name)
        if shown.console and name in numbers and not is_zero_skipped:
            words.append(shown.console.format(numbers[name]))
    waiting_share = numbers.get("data wait", 0.0) / numbers.get("step time", 1.0)
    if waiting_share >= _NOTABLE_WAIT:
        words.append(f"{waiting_share:.0%} waiting for data")
    return "  ".join(words)


def _times_line(numbers: Metrics) -> str:
    """The timed parts of a step in milliseconds, the longest first; empty without timers."""
    times = {name: value * 1e3 for name, value in numbers.items() if name.startswith(PREFIX)}
    longest = sorted(times, key=lambda name: -times[name])
    words = [
        f"{name.removeprefix(PREFIX)} {_minimum_shown(times.get(f'{name} min'), times[name])}{times[name]:.1f}"
        for name in longest
        if not name.endswith(" min") and times[name] >= _SHORTEST_SHOWN
    ]
    return f"      ms per step: {', '.join(words)}" if words else ""


def _minimum_shown(minimum: float | None, maximum: float) -> str:
    return "" if minimum is None or f"{minimum:.1f}" == f"{maximum:.1f}" else f"{minimum:.1f} to "


class JsonLinesOutput:
    """One JSON object per line, in full precision, for plots and comparisons."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def open(self, step: int, train_iters: int) -> None:
        """Append after ``step``; later lines, which a killed run wrote after its last checkpoint, are removed."""
        with self._refuse_unwritable():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json_lines.text_until(self._path, step))
            self._file = self._path.open("a", buffering=1)

    def write(self, step: int, kind: str, numbers: Metrics) -> None:
        assert self._file is not None, "not open"
        with self._refuse_unwritable():
            self._file.write(json.dumps({"step": step, "kind": kind} | numbers) + "\n")

    def _refuse_unwritable(self) -> AbstractContextManager[None]:
        return refuse_unwritable(str(self._path), "choose another logger.log_dir")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoardOutput:
    """TensorBoard scalars, named by kind and metric."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, step: int, train_iters: int) -> None:
        """Start an event file; it replaces what a killed run wrote after ``step``."""
        from torch.utils.tensorboard.writer import SummaryWriter  # 1 s to import

        with refuse_unwritable(f"logger.tensorboard_dir={self._folder}"):
            self._writer = SummaryWriter(self._folder, purge_step=step + 1)

    def write(self, step: int, kind: str, numbers: Metrics) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


NAMESPACE = "megatron_bridge_"


class PrometheusOutput:
    """A page at ``http://HOST:PORT/metrics`` with the last values, from a thread of the first rank."""

    def __init__(self, config: ConfigContainer) -> None:
        self._host = config.logger.prometheus_host
        self._port = config.logger.prometheus_port
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
            self._gauge("checkpoint_timestamp_seconds", text).set_function(
                lambda: _published_at(folder)
            )
        try:
            self._server, _ = self._client.start_http_server(
                self._port, self._host, registry=self._registry
            )
        except OSError as error:
            raise UserError(
                f"{key} cannot be opened on logger.prometheus_host={self._host} ({error.strerror or error}): "
                "choose another port or an address of this machine"
            ) from error
        print_rank_0(f"metrics for Prometheus: http://{self._host}:{self._port}/metrics")

    def write(self, step: int, kind: str, numbers: Metrics) -> None:
        self._gauge("step", "").set(step)
        for name, value in numbers.items():
            if name in METRIC_FORMATS:
                shown = METRIC_FORMATS[name]
                self._gauge(shown.gauge, shown.meaning).set(value * shown.factor)
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
        iteration = paths.latest_iteration(root)
    except UserError:
        return (
            -1
        )  # the tracker is being replaced, or damaged, which the run reports when it reads it
    return -1 if iteration is None else iteration


def _published_at(root: Path) -> float:
    tracker = root / paths.TRACKER
    return tracker.stat().st_mtime if tracker.is_file() else 0.0
