# SPDX-License-Identifier: Apache-2.0
"""A run as one HTML page with its curves as pictures inside; it needs no network and no script."""

from collections.abc import Sequence
from datetime import datetime
from html import escape
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.bridge.utils.run_status import RunStatus

_WIDTH, _HEIGHT = 900, 220
_COLORS = {"train": "#3867b0", "validation": "#c8743c", "test": "#4a8f5a"}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:940px;margin:2em auto;padding:0 1em}"
    "td{padding:0 1.5em 0 0;vertical-align:top}svg{width:100%;height:auto;border:1px solid #ccc}"
    "h2{font-size:1.1em;margin:1.5em 0 .3em}"
)


def page(status: "RunStatus", metrics: Sequence[str], now: datetime) -> str:
    """The page.

    Args:
        status: The run.
        metrics: The curves to draw.
        now: Local time.
    """
    cells = [(escape(name), escape(value)) for name, value in status.summary(now).items()]
    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in cells)
    curves = "".join(f"<h2>{escape(metric)}</h2>{_curve(status, metric)}" for metric in metrics)
    title = escape(str(status.folder))
    # a browser looks again by itself while the run is watched
    again = '<meta http-equiv="refresh" content="10">' if status.state == "running" else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{again}<title>{title}</title>'
        f"<style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{now:%Y-%m-%d %H:%M:%S}</p><table>{rows}</table>{curves}</html>\n"
    )


def _curve(status: "RunStatus", metric: str) -> str:
    points = {kind: [(row["step"], value) for row, value in status.values(metric, kind)] for kind in _COLORS}
    found = [(x, y) for part in points.values() for x, y in part if isfinite(y)]
    if not found:
        return "<p>no finite value</p>"
    (left, right), (low, high) = [(min(axis), max(axis)) for axis in zip(*found, strict=True)]

    def place(x: float, y: float) -> str:
        across = (x - left) / ((right - left) or 1) * _WIDTH
        return f"{across:.1f},{_HEIGHT - (y - low) / ((high - low) or 1) * _HEIGHT:.1f}"

    drawn = {kind: [place(x, y) for x, y in part if isfinite(y)] for kind, part in points.items()}
    lines = [_line(part, _COLORS[kind]) for kind, part in drawn.items() if part]
    shown = ", ".join(
        f'<span style="color:{_COLORS[kind]}">{kind}</span>' for kind, part in points.items() if part
    )
    return (
        f'<svg viewBox="-8 -8 {_WIDTH + 16} {_HEIGHT + 16}">{"".join(lines)}</svg>'
        f"<div>{shown}: {low:,.5g} to {high:,.5g}, steps {left:,} to {right:,}</div>"
    )


def _line(points: Sequence[str], color: str) -> str:
    if len(points) == 1:
        x, _, y = points[0].partition(",")
        return f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>'
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>'
