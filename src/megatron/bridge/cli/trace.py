# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge trace``: the traces of PyTorch's profiler."""

import argparse
from pathlib import Path

from megatron.bridge.cli.support import text_format
from megatron.bridge.cli.support.output_files import HtmlPage, OutputFile
from megatron.bridge.cli.support.overlap_page import overlap_page
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.html_table import html_table
from megatron.bridge.utils.profiler_overlap import KindOverlap, Overlap, analyze
from megatron.bridge.utils.profiler_traces import find_traces, merge, read


def add_arguments(parser: Parser) -> None:
    parser.description = "Work with the traces that profiling.use_pytorch_profiler=true writes."
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    merging = commands.add_parser(
        "merge",
        help="merge the traces of all ranks into one",
        description=(
            "Merge the traces of all ranks into one. Open it at https://ui.perfetto.dev or in "
            "chrome://tracing."
        ),
    )
    merging.add_argument(
        "folder",
        type=Path,
        metavar="RUN_DIR",
        help="a run's folder, or a folder of traces in it",
    )
    merging.add_argument(
        "-o",
        "--output",
        type=OutputFile,
        metavar="FILE",
        help="default: merged.json.gz next to the traces",
    )
    merging.add_argument(
        "--clock",
        choices=["wall", "barrier"],
        default="wall",
        help=(
            "how to align the ranks. wall: by the clocks of the machines; barrier: by the barrier "
            "before the first profiled step, for machines whose clocks differ (default: "
            "%(default)s)"
        ),
    )
    _add_overlap_arguments(
        commands.add_parser(
            "overlap",
            help="tell how much communication was hidden behind computation",
            description=(
                "Tell how long each rank computed and communicated, how much communication was hidden "
                "behind computation, and for which messages it waited."
            ),
        )
    )


def _add_overlap_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder",
        type=Path,
        metavar="RUN_DIR",
        help="a run's folder, or a folder of traces in it",
    )
    command.add_argument(
        "--html", type=HtmlPage, metavar="FILE", help="also write a web page with timelines"
    )


def run(args: argparse.Namespace) -> int:
    return _merge_traces(args) if args.subcommand == "merge" else _show_overlap(args)


def _merge_traces(args: argparse.Namespace) -> int:
    traces = find_traces(args.folder)
    target = args.output or next(iter(traces.values())).with_name("merged.json.gz")
    merged = merge(traces, target, args.clock)
    ranks = f"rank {merged.ranks[0]}" if len(merged.ranks) == 1 else f"{len(merged.ranks)} ranks"
    text_format.say(
        f"{target}: {merged.events:,} events of {ranks}; by their clocks, all ranks left the barrier before the "
        f"first step within {merged.apart * 1e3:.3f} ms"
    )
    return 0


def _show_overlap(args: argparse.Namespace) -> int:
    overlaps: dict[int, Overlap] = {}
    for rank, path in find_traces(args.folder).items():
        overlap = analyze(read(path)["traceEvents"])
        if overlap is None:
            raise UserError(
                f"{path} has no kernels and no operators: profile with profiling.use_pytorch_profiler=true"
            )
        overlaps[rank] = overlap
    tables = [_rank_rows(overlaps), _message_rows(overlaps)]
    for rows in tables:
        for line in text_format.columns(rows):
            text_format.say(line)
        text_format.say("")
    if args.html is not None:
        page = overlap_page(
            f"Communication and computation in {args.folder}",
            overlaps,
            "".join(html_table(rows[0], rows[1:]) for rows in tables),
        )
        text_format.write_file("--html", args.html, page)
        text_format.say(f"{args.html} shows when ranks compute and communicate")
    return 0


def _rank_rows(overlaps: dict[int, Overlap]) -> list[list[str]]:
    rows = [["rank", "steps", "computing", "communicating", "of it hidden", "waiting", "idle"]]
    for rank, overlap in overlaps.items():
        total = overlap.seconds
        hidden = overlap.hidden / overlap.communicating if overlap.communicating else 0.0
        rows.append(
            [
                str(rank),
                f"{total * 1e3:.1f} ms",
                f"{overlap.computing / total:.0%}",
                f"{overlap.communicating / total:.0%}",
                f"{hidden:.0%}",
                f"{overlap.exposed / total:.0%}",
                f"{overlap.idle / total:.0%}",
            ]
        )
    return rows


def _message_rows(overlaps: dict[int, Overlap]) -> list[list[str]]:
    """Return a row for each kind and group of messages, of all ranks."""
    rows = [["message", "group", "count", "a rank's time", "hidden", "GB/s"]]
    by_kind: dict[tuple[str, str], list[KindOverlap]] = {}
    for overlap in overlaps.values():
        for kind in overlap.kinds:
            by_kind.setdefault((kind.kind, kind.group), []).append(kind)
    for (name, group), kinds in by_kind.items():
        seconds = sum(kind.seconds for kind in kinds)
        exposed = sum(kind.exposed for kind in kinds)
        sizes = [kind.size for kind in kinds if kind.size is not None]
        is_known = len(sizes) == len(kinds) and seconds > 0
        rows.append(
            [
                name,
                group or "-",
                f"{sum(kind.count for kind in kinds):,}",
                f"{seconds / len(kinds) * 1e3:.1f} ms",
                f"{1 - exposed / seconds:.0%}" if seconds else "-",
                f"{sum(sizes) / seconds / 1e9:.1f}" if is_known else "-",
            ]
        )
    return rows
