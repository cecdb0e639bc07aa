# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge plot``: curves of one or several runs."""

import argparse
from pathlib import Path

from megatron.bridge.cli.support import text_format
from megatron.bridge.cli.support.output_files import OutputFile
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.utils import loss_curves
from megatron.bridge.utils.errors import UserError

PICTURE = "curves.png"


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Plot metrics of one or several runs, by default loss and throughput, from metrics.jsonl."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run's folder, or its metrics.jsonl",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=OutputFile,
        default=PICTURE,
        metavar="FILE",
        help="picture (default: %(default)s)",
    )
    parser.add_argument(
        "--metric", action="append", metavar="NAME", help="metric to plot; repeatable"
    )
    parser.add_argument(
        "--smooth",
        type=int,
        default=1,
        metavar="N",
        help="plot means of N points; the points stay visible",
    )
    parser.add_argument(
        "--x",
        choices=["step", "tokens", "time"],
        default="step",
        help="horizontal axis (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    if args.smooth < 1:
        raise UserError(f"--smooth {args.smooth}: at least 1 point is needed")
    metrics = args.metric or [loss_curves.LOSS, loss_curves.THROUGHPUT]
    rows = [loss_curves.read_metrics(path) for path in args.runs]
    panels: dict[str, list[loss_curves.Curve]] = {}
    for metric in dict.fromkeys(metrics):
        for path, label, run_rows in zip(args.runs, _labels(args.runs), rows, strict=True):
            panels.setdefault(metric, []).extend(
                loss_curves.curves(run_rows, metric, label, args.x, str(path))
            )
    picture = _file(args.output)
    loss_curves.draw(picture, panels, loss_curves.AXES[args.x], args.smooth)
    text_format.say(f"{picture}: {', '.join(panels)} of {text_format.many(len(args.runs), 'run')}")
    return 0


def _file(output: Path) -> Path:
    """The file of the picture; its suffix is its format."""
    file = output / PICTURE if output.is_dir() else output
    return file if file.suffix else file.with_suffix(".png")


def _labels(paths: list[Path]) -> list[str]:
    """Return the shortest suffixes that distinguish the paths, or an empty label for a single run."""
    if len(paths) == 1:
        return [""]
    parts = [(path if path.is_dir() else path.parent).resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{position} {path}" for position, path in enumerate(paths, start=1)]
