# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge trace``: what PyTorch's profiler left."""

import argparse
import sys
from pathlib import Path


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``trace`` with ``merge``."""
    parser = subparsers.add_parser(
        "trace",
        help="merge the profiler's traces of all ranks into one for Perfetto",
        description="Work with the traces that profiling.use_pytorch_profiler=true leaves.",
    )
    merge = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "merge",
        help="one trace of all ranks",
        description="Merge the traces of all ranks into one, to be opened at https://ui.perfetto.dev or in "
        "chrome://tracing.",
    )
    merge.add_argument("folder", type=Path, metavar="RUN_DIR", help="a run's folder, or a folder of traces in it")
    merge.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: merged.json.gz beside the traces"
    )
    merge.add_argument(
        "--clock",
        choices=["wall", "barrier"],
        default="wall",
        help="wall: as the machines' clocks say; barrier: all ranks leave the barrier before the first profiled "
        "step at once, for machines whose clocks differ (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merge, and say what came of it."""
    from megatron.bridge.utils.traces import find_traces, merge

    traces = find_traces(args.folder)
    target = args.output or next(iter(traces.values())).with_name("merged.json.gz")
    merged = merge(traces, target, args.clock)
    ranks = f"rank {merged.ranks[0]}" if len(merged.ranks) == 1 else f"{len(merged.ranks)} ranks"
    sys.stdout.write(
        f"{target}: {merged.events:,} events of {ranks}, which by their clocks left "
        f"the barrier before the first step within {merged.apart * 1e3:.3f} ms\n"
    )
    return 0
