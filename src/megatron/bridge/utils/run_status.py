# SPDX-License-Identifier: Apache-2.0
"""The status of a run: its progress, speed, end and newest checkpoint, from the files that it writes."""

import re
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.bridge.utils import json_lines, loss_curves
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError

CONFIG = "run_config.yaml"
TRACKER = "latest_checkpointed_iteration.txt"
SILENCE = 120.0  # a run with short steps is not considered running after this many seconds without a new line
_FORMATS = {
    "tokens per second": "{:,.0f}",
    "step time": "{:.3g} s",
    "MFU": "{:.1%}",
    "peak memory GB": "{:.2f}",
}
_FORMATS |= {"consumed tokens": "{:,}", "skipped steps": "{}"}
_TIMER = re.compile(r"time/(.+) rank (\d+)")


@dataclass(frozen=True)
class RunStatus:
    folder: Path
    rows: list[json_lines.Row]  # the lines of ``metrics.jsonl``
    train_iters: int | None  # the step at which the run ends; None if its config is missing
    age: float  # seconds since the last line
    checkpoint: str  # the newest checkpoint, as text

    @property
    def train(self) -> list[json_lines.Row]:
        return [row for row in self.rows if row["kind"] == "train"]

    def values(self, metric: str, kind: str) -> list[tuple[json_lines.Row, float]]:
        return [(row, row[metric]) for row in self.rows if row["kind"] == kind and metric in row]

    @property
    def step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def state(self) -> str:
        """Return ``finished``, ``running`` or ``silent`` (stopped, or in a long pause)."""
        if self.train_iters is not None and self.step >= self.train_iters:
            return "finished"
        steps_between_rows = [
            after["step"] - before["step"] for before, after in pairwise(self.train)
        ]
        usual = max(steps_between_rows, default=1) * self._step_time
        return "running" if self.age <= max(SILENCE, 3 * usual) else "silent"

    @property
    def _step_time(self) -> float:
        return self.train[-1].get("step time", 0.0) if self.train else 0.0

    def summary(self, now: datetime) -> dict[str, str]:
        """Return the values to show, by name; the expected end ignores the time of evaluations and saves."""
        total = (
            ""
            if self.train_iters is None
            else f" of {self.train_iters:,} ({self.step / self.train_iters:.0%})"
        )
        values = {"state": self._state_in_words(), "step": f"{self.step:,}{total}"}
        last = self.train[-1] if self.train else {}
        if self.state == "running" and self.train_iters is not None and self._step_time:
            seconds = max(0.0, (self.train_iters - self.step) * self._step_time - self.age)
            values["time"] = remaining(timedelta(seconds=round(seconds)), now)
        values |= {name: form.format(last[name]) for name, form in _FORMATS.items() if name in last}
        values["checkpoint"] = self.checkpoint
        return values | self._slowest_rank(last)

    def _state_in_words(self) -> str:
        if self.state != "silent":
            return self.state
        return f"no new line for {timedelta(seconds=round(self.age))}: stopped, or in a long pause"

    def _slowest_rank(self, last: json_lines.Row) -> dict[str, str]:
        """Return the slowest rank, if the run logs the times of all ranks (``logger.timing_log_option=all``)."""
        times = {
            (match[1], int(match[2])): last[name]
            for name in last
            if (match := _TIMER.fullmatch(name))
        }
        if not times:
            return {}
        part = max(times, key=lambda key: times[key])[0]
        of_part = {rank: seconds for (name, rank), seconds in times.items() if name == part}
        rank = max(of_part, key=lambda key: of_part[key])
        usual = sorted(of_part.values())[len(of_part) // 2]
        return {
            "slowest rank": f"{rank}, {part} {of_part[rank]:.3g} s, the median is {usual:.3g} s"
        }


def read_status(run: Path) -> RunStatus:
    """Read the status of a run from its folder (``logger.log_dir``) or its ``metrics.jsonl``."""
    folder = run if run.is_dir() else run.parent
    rows = loss_curves.read_metrics(run)
    file = folder / loss_curves.METRICS if run.is_dir() else run
    config = _read_config(folder / CONFIG)
    iterations = config.get("train", {}).get("train_iters")
    saved = config.get("checkpoint", {}).get("save")
    age = max(0.0, time.time() - file.stat().st_mtime)
    return RunStatus(folder, rows, iterations, age, _newest_checkpoint(folder, saved))


def _read_config(file: Path) -> dict[str, Any]:
    try:
        content = yaml_text.read(file.read_text(), str(file)) if file.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}): repair or remove it") from error
    return content if isinstance(content, dict) else {}


def _newest_checkpoint(folder: Path, saved: str | None) -> str:
    """Describe the newest checkpoint in the configured folder or, if the run was moved, in the run's folder."""
    for root in [folder, *([Path(saved)] if saved else [])]:
        tracker = root / TRACKER
        if tracker.is_file():
            at = datetime.fromtimestamp(tracker.stat().st_mtime)
            return f"step {tracker.read_text().strip()}, {at:%Y-%m-%d %H:%M}, in {root}"
    return "none yet" if saved else "the run saves none"


def remaining(left: timedelta, now: datetime) -> str:
    """Return the time until the end of a run, and the end in local time if it is more than a minute away.

    Example:
        >>> remaining(timedelta(hours=30), datetime(2026, 1, 2, 22, 15))
        '1 day, 6:00:00 left, ends Sun Jan 4 04:15'
    """
    if left < timedelta(minutes=1):
        return f"{left} left"
    end = now + left
    day = "" if end.date() == now.date() else f"{end:%a %b} {end.day} "
    return f"{left} left, ends {day}{end:%H:%M}"
