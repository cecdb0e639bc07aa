# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge plot``: what runs looked like."""

import argparse
import sys
from pathlib import Path

from megatron.bridge.cli import words
from megatron.bridge.utils.errors import UserError

PICTURE = "curves.png"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``plot``."""
    parser = subparsers.add_parser(
        "plot",
        help="loss and throughput of one or several runs as a picture",
        description="Draw numbers of one or several runs, by default loss and throughput, from metrics.jsonl.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its metrics.jsonl")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(PICTURE), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--metric", action="append", metavar="NAME", help="what to draw (may be repeated)")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="draw means of N points; the points stay visible"
    )
    parser.add_argument(
        "--x", choices=["step", "tokens", "time"], default="step", help="along the axis (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw, and say where it is."""
    from megatron.bridge.utils import curves

    if args.smooth < 1:
        raise UserError(f"--smooth {args.smooth}: at least 1 point is needed")
    metrics = args.metric or [curves.LOSS, curves.THROUGHPUT]
    rows = [curves.read_metrics(place) for place in args.runs]
    panels: dict[str, list[curves.Curve]] = {}
    for metric in dict.fromkeys(metrics):
        for place, label, found in zip(args.runs, _labels(args.runs), rows, strict=True):
            panels.setdefault(metric, []).extend(curves.curves(found, metric, label, args.x, str(place)))
    picture = _file(args.output)
    curves.draw(picture, panels, curves.AXES[args.x], args.smooth)
    sys.stdout.write(f"{picture}: {', '.join(panels)} of {words.many(len(args.runs), 'run')}\n")
    return 0


def _file(output: Path) -> Path:
    """Where the picture goes; the ending says of which kind it is."""
    file = output / PICTURE if output.is_dir() else output
    return file if file.suffix else file.with_suffix(".png")


def _labels(places: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart; nothing for one run alone."""
    if len(places) == 1:
        return [""]
    parts = [(place if place.is_dir() else place.parent).resolve().parts for place in places]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number} {place}" for number, place in enumerate(places, start=1)]
