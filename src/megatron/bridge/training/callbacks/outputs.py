# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of a run go: the console, ``metrics.jsonl``, TensorBoard; trackers are beside this file."""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Protocol

from rich.live import Live
from rich.text import Text

from megatron.bridge.training.callbacks.trackers import MLflowOutput, WandbOutput
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

Numbers = dict[str, float | int]
METRICS_FILE = "metrics.jsonl"


class Output(Protocol):
    """One place that numbers are written to, on the first rank."""

    def open(self, step: int, train_iters: int) -> None:
        """Begin, or go on after ``step`` of ``train_iters``."""
        ...

    def write(self, step: int, kind: str, numbers: Numbers) -> None:
        """Write the numbers of ``kind`` (train, validation, test) after ``step``."""
        ...

    def close(self) -> None:
        """Flush and release; called once, also after an error and before ``open``."""
        ...


def outputs(config: ConfigContainer) -> list[Output]:
    """The outputs that the config asks for."""
    chosen: list[Output] = [ConsoleOutput()]
    if config.logger.log_dir:
        chosen.append(JsonLinesOutput(Path(config.logger.log_dir) / METRICS_FILE))
    if config.logger.tensorboard_dir:
        chosen.append(TensorBoardOutput(config.logger.tensorboard_dir))
    if config.logger.wandb_project:
        chosen.append(WandbOutput(config))
    if config.logger.mlflow_experiment:
        chosen.append(MLflowOutput(config))
    return chosen


class ConsoleOutput:
    """Plain lines in a log; in a terminal one live line for training, and lines for evaluations."""

    def __init__(self) -> None:
        self._console = console()
        self._live: Live | None = None
        self._train_iters = 0
        self._first_step = 0
        self._started = 0.0

    def open(self, step: int, train_iters: int) -> None:
        """Start the live line."""
        self._first_step, self._train_iters, self._started = step, train_iters, time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()

    def write(self, step: int, kind: str, numbers: Numbers) -> None:
        """One line."""
        if kind != "train":
            shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
            self._console.print(f"{kind} after step {step}: {shown}", markup=False)
            return
        line = f"step {step}/{self._train_iters}  {_train_line(numbers)}  {self._remaining(step)} left"
        if self._live is None:
            self._console.print(line, markup=False)
        else:
            self._live.update(Text(line), refresh=True)

    def close(self) -> None:
        """Leave the last line standing."""
        if self._live is not None:
            self._live.stop()

    def _remaining(self, step: int) -> str:
        """Time to the last step at the speed so far, everything between steps included."""
        per_step = (time.monotonic() - self._started) / max(step - self._first_step, 1)
        return str(timedelta(seconds=round(per_step * (self._train_iters - step))))


_NO_LOSSES = frozenset(
    {
        *("learning rate", "grad norm", "step time", "tokens per second", "TFLOP/s per process"),
        *("consumed samples", "skipped steps"),
    }
)


def _train_line(numbers: Numbers) -> str:
    words = [f"{name} {value:.4f}" for name, value in numbers.items() if name not in _NO_LOSSES]
    words.append(f"lr {numbers['learning rate']:.2e}")
    if "grad norm" in numbers:
        words.append(f"grad norm {numbers['grad norm']:.3f}")
    words.append(f"{numbers['tokens per second']:,.0f} tokens/s")
    if "TFLOP/s per process" in numbers:
        words.append(f"{numbers['TFLOP/s per process']:.3g} TFLOP/s")
    if numbers["skipped steps"]:
        words.append(f"{numbers['skipped steps']} skipped")
    return "  ".join(words)


class JsonLinesOutput:
    """One JSON object per line, with every digit: what plots and comparisons read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def open(self, step: int, train_iters: int) -> None:
        """Go on behind ``step``: what a killed run wrote after its last checkpoint is done again, so it goes."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, "".join(_lines_until(self._path, step)))
            self._file = self._path.open("a", buffering=1)
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written: {error.strerror}; choose another logger.log_dir"
            ) from error

    def write(self, step: int, kind: str, numbers: Numbers) -> None:
        """One line, flushed."""
        assert self._file is not None, "not open"
        self._file.write(json.dumps({"step": step, "kind": kind} | numbers) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _lines_until(path: Path, step: int) -> list[str]:
    if step == 0 or not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]


class TensorBoardOutput:
    """Scalars by kind and name."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, step: int, train_iters: int) -> None:
        """Start an event file that replaces what was written after ``step``."""
        from torch.utils.tensorboard.writer import SummaryWriter  # 1 s to import

        self._writer = SummaryWriter(self._folder, purge_step=step + 1)

    def write(self, step: int, kind: str, numbers: Numbers) -> None:
        """One scalar per number."""
        for name, value in numbers.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
