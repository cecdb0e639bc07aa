# SPDX-License-Identifier: Apache-2.0
"""Plot curves of runs from ``metrics.jsonl``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from megatron.bridge.utils import json_lines
from megatron.bridge.utils.errors import UserError, did_you_mean

METRICS = "metrics.jsonl"
LOSS, THROUGHPUT = "lm loss", "tokens per second"

Axis = Literal["step", "tokens", "time"]
AXES: dict[str, str] = {
    "step": "step",
    "tokens": "tokens (10^9)",
    "time": "hours of training steps",
}
_SKIPPED = ("step", "kind")


@dataclass(frozen=True)
class Curve:
    """Points of one metric of one run."""

    label: str  # the text in the legend
    kind: str  # train, validation or test
    x: list[float] = field(repr=False)  # positions along the axis
    y: list[float] = field(repr=False)  # values


def read_metrics(run: Path) -> list[json_lines.Row]:
    """Read the rows of a run's folder or file; later rows replace earlier rows of a step that was repeated."""
    path = run / METRICS if run.is_dir() else run
    if not path.is_file():
        raise UserError(
            f"{path} cannot be read: give a run's folder (logger.log_dir) or its {METRICS}"
        )
    rows: list[json_lines.Row] = []
    for row in json_lines.read(path):
        while rows and row["step"] < rows[-1]["step"]:
            rows.pop()
        rows.append(row)
    return list({(row["step"], row["kind"]): row for row in rows}.values())


def curves(
    rows: Sequence[json_lines.Row],
    metric: str,
    label: str,
    axis: Axis = "step",
    source: str = "the run",
) -> list[Curve]:
    """Return the curve of a metric in training, and the curves of evaluations that have the metric.

    ``axis`` is ``step``; ``tokens`` consumed; or ``time``, hours of steps without the pauses between them.
    """
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _SKIPPED))
    if metric not in names:
        raise UserError(
            f"{source} has no metric {metric!r}{did_you_mean(metric, names) or f'; it has {", ".join(names)}'}"
        )
    position_of = _axis_positions(rows, axis, source)
    result: list[Curve] = []
    for kind in ("train", "validation", "test"):
        points = [
            (position_of(row["step"]), row[metric])
            for row in rows
            if row["kind"] == kind and metric in row
        ]
        if points:
            result.append(Curve(label, kind, [x for x, _ in points], [y for _, y in points]))
    return result


def _axis_positions(rows: Sequence[json_lines.Row], axis: Axis, source: str) -> Any:
    """Return a function from a step to its position along the axis, linear between known steps."""
    if axis == "step":
        return float
    name = {"tokens": "consumed tokens", "time": "step time"}[axis]
    train = [row for row in rows if row["kind"] == "train" and name in row]
    if not train:
        raise UserError(f"{source} does not have {name!r}, which --x {axis} needs: use --x step")
    from numpy import interp

    steps = [row["step"] for row in train]
    if axis == "tokens":
        known = [row[name] / 1e9 for row in train]
    else:  # it begins at 0
        steps = [0, *steps]
        seconds = (
            (step - before) * row[name]
            for (before, step), row in zip(pairwise(steps), train, strict=True)
        )
        known = [total / 3600 for total in accumulate(seconds, initial=0.0)]
    return lambda step: float(interp(step, steps, known))


def smoothed(values: Sequence[float], points: int) -> list[float]:
    """Return the mean of each value and the values before it, ``points`` in total, or fewer at the start.

    Example:
        >>> smoothed([4.0, 2.0, 3.0], 2)
        [4.0, 3.0, 2.5]
    """
    windows = (values[max(0, end - points) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def draw(path: Path, panels: dict[str, list[Curve]], xlabel: str = "step", smooth: int = 1) -> None:
    """Write a picture of the points and their means over ``smooth`` points; the suffix gives the format."""
    from matplotlib.figure import (
        Figure,
    )  # takes 0.5 s to import; without a window system or global state

    figure: Any = Figure(
        figsize=(8, 0.9 + 3.6 * len(panels)), layout="constrained"
    )  # its type hints are partial
    grid = figure.subplots(len(panels), squeeze=False).flat
    for axes, (ylabel, curves_of_panel) in zip(grid, panels.items(), strict=True):
        colors = {
            label: f"C{index % 10}"
            for index, label in enumerate(dict.fromkeys(c.label for c in curves_of_panel))
        }
        for curve in curves_of_panel:
            _draw_curve(axes, curve, colors[curve.label], smooth)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(alpha=0.3)
        if xlabel == AXES["step"]:
            axes.xaxis.get_major_locator().set_params(integer=True)
        if any(curve.label or curve.kind != "train" for curve in curves_of_panel):
            axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be written ({error}): choose another file, such as curves.png"
        ) from error


def _draw_curve(axes: Any, curve: Curve, color: str, smooth: int) -> None:
    label = (
        f"{curve.label} {curve.kind}".strip()
        if curve.kind != "train" or not curve.label
        else curve.label
    )
    if curve.kind != "train":
        marker = "o--" if curve.kind == "validation" else "s"
        axes.plot(curve.x, curve.y, marker, color=color, label=label, markersize=4)
        return
    if smooth > 1:
        axes.plot(curve.x, curve.y, color=color, alpha=0.25, linewidth=1)
    style = "-" if len(curve.x) > 1 else "o"
    axes.plot(curve.x, smoothed(curve.y, smooth), style, color=color, label=label, linewidth=1.5)
