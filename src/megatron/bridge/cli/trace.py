# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge trace``: the traces of PyTorch's profiler."""

import argparse
from pathlib import Path

from megatron.bridge.cli.support import text_format
from megatron.bridge.cli.support.output_files import OutputFile
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.utils.profiler_traces import find_traces, merge


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


def run(args: argparse.Namespace) -> int:
    traces = find_traces(args.folder)
    target = args.output or next(iter(traces.values())).with_name("merged.json.gz")
    merged = merge(traces, target, args.clock)
    ranks = f"rank {merged.ranks[0]}" if len(merged.ranks) == 1 else f"{len(merged.ranks)} ranks"
    text_format.say(
        f"{target}: {merged.events:,} events of {ranks}; by their clocks, all ranks left the barrier before the "
        f"first step within {merged.apart * 1e3:.3f} ms"
    )
    return 0
