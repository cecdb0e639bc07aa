# SPDX-License-Identifier: Apache-2.0
"""A run as one HTML page with its curves inside; it needs no network and no script."""

import base64
import tempfile
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.utils import loss_curves

if TYPE_CHECKING:
    from megatron.bridge.utils.run_status import RunStatus

_STYLE = "body{font:15px/1.5 sans-serif;max-width:940px;margin:2em auto}td{padding-right:1.5em}img{width:100%}"


def page(status: "RunStatus", metrics: Sequence[str], now: datetime) -> str:
    """The page of a run with the curves of ``metrics``; ``now`` is local time."""
    cells = [(escape(name), escape(value)) for name, value in status.summary(now).items()]
    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in cells)
    title = escape(str(status.folder))
    # a browser looks again by itself while the run is watched
    again = '<meta http-equiv="refresh" content="10">' if status.state == "running" else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{again}<title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{now:%Y-%m-%d %H:%M:%S}</p><table>{rows}</table>"
        f"{_picture(status, metrics) if metrics else ''}</html>\n"
    )


def _picture(status: "RunStatus", metrics: Sequence[str]) -> str:
    panels = {metric: loss_curves.curves(status.rows, metric, "", source=str(status.folder)) for metric in metrics}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "curves.svg")
        loss_curves.draw(file, panels)
        data = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="curves" src="data:image/svg+xml;base64,{data}">'
