# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge watch``: a run in the terminal, while it trains or afterwards."""

import argparse
import base64
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from html import escape
from itertools import pairwise
from math import isfinite
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron.bridge.cli.support.output_files import HtmlPage
from megatron.bridge.cli.support.parser import Parser, count
from megatron.bridge.cli.support.text_format import write_file
from megatron.bridge.utils import loss_curves
from megatron.bridge.utils.errors import UserError, did_you_mean
from megatron.bridge.utils.run_status import RunStatus, read_status

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60


EXAMPLES = """examples:
  megatron-bridge watch runs/llama
  megatron-bridge watch runs/llama --once --metric "grad norm"
  megatron-bridge watch runs/llama --once --html llama.html
"""


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Show curves, speed, the expected end and the newest checkpoint of a run, until it ends."
    )
    parser.epilog = EXAMPLES
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a run's folder, or its metrics.jsonl"
    )
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="curve to show; repeatable (default: loss and throughput)",
    )
    parser.add_argument(
        "--interval",
        type=count,
        default=5,
        metavar="SECONDS",
        help="time between two updates (default: %(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the current state, and exit (as in a pipe)"
    )
    parser.add_argument(
        "--html",
        type=HtmlPage,
        metavar="FILE",
        help="also write an HTML page, which needs no network",
    )


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    status = read_status(args.run)
    metrics = _metrics(status, args.metric)
    if args.once or not console.is_terminal:
        _write_page(status, metrics, args.html)
        console.print(_view(status, metrics))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(_view(status, metrics), refresh=True)
                _write_page(status, metrics, args.html)
                if status.state == "finished":
                    break
                time.sleep(args.interval)
                status = read_status(args.run)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0


def _metrics(status: RunStatus, asked: list[str] | None) -> list[str]:
    known = list(
        dict.fromkeys(name for row in status.rows for name in row if name not in ("step", "kind"))
    )
    for name in asked or ():
        if known and name not in known:
            hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise UserError(f"--metric {name} is not in {status.folder}{hint}")
    if asked:
        return list(dict.fromkeys(asked))
    return [name for name in (loss_curves.LOSS, loss_curves.THROUGHPUT) if name in known]


def _view(status: RunStatus, metrics: list[str]) -> Group:
    table = Table.grid(padding=(0, 2))
    for name, value in status.summary(datetime.now()).items():
        table.add_row(Text(name), Text(value, overflow="fold"))
    for metric in metrics:
        for kind in ("train", "validation", "test"):
            values = [value for _, value in status.values(metric, kind)]
            if values:
                label = metric if kind == "train" else f"{metric} ({kind})"
                ends = f"{values[0]:,.5g} to {values[-1]:,.5g}, lowest {min(values):,.5g}, highest {max(values):,.5g}"
                table.add_row(Text(label), Text(f"{sparkline(values, WIDTH)}\n{ends}"))
    return Group(Text(str(status.folder), style="bold"), table)


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line of at most ``width`` characters, each the mean of its share of the values.

    Example:
        >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8), sparkline([2, 4, 0, 0], 2)
        ('▁▂▃▄▅▆▇█', '█▁')
    """
    edges = [
        len(values) * index // min(width, len(values))
        for index in range(min(width, len(values)) + 1)
    ]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    finite = [mean for mean in means if isfinite(mean)]
    minimum = min(finite, default=0.0)
    maximum = max(finite, default=0.0)
    return "".join(_bar(mean, minimum, maximum) for mean in means)


def _bar(value: float, minimum: float, maximum: float) -> str:
    if not minimum <= value <= maximum:
        return "?"  # NaN or infinite
    share = 0.0 if maximum == minimum else (value - minimum) / (maximum - minimum)
    return BARS[min(int(share * len(BARS)), len(BARS) - 1)]


def _write_page(status: RunStatus, metrics: list[str], file: Path | None) -> None:
    if file is not None:
        write_file("--html", file, page(status, metrics, datetime.now()))


_STYLE = "body{font:15px/1.5 sans-serif;max-width:940px;margin:2em auto}td{padding-right:1.5em}img{width:100%}"


def page(status: RunStatus, metrics: Sequence[str], now: datetime) -> str:
    """The page of a run with the curves of ``metrics``; ``now`` is local time."""
    cells = [(escape(name), escape(value)) for name, value in status.summary(now).items()]
    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in cells)
    title = escape(str(status.folder))
    # the browser reloads the page while the run trains
    again = '<meta http-equiv="refresh" content="10">' if status.state == "running" else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{again}<title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{now:%Y-%m-%d %H:%M:%S}</p><table>{rows}</table>"
        f"{_picture(status, metrics) if metrics else ''}</html>\n"
    )


def _picture(status: RunStatus, metrics: Sequence[str]) -> str:
    panels = {
        metric: loss_curves.curves(status.rows, metric, "", source=str(status.folder))
        for metric in metrics
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "curves.svg")
        loss_curves.draw(file, panels)
        data = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="curves" src="data:image/svg+xml;base64,{data}">'
