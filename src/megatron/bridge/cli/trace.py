# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge trace``: the traces of PyTorch's profiler."""

import argparse

from megatron.bridge.cli.support import text_format
from megatron.bridge.utils.profiler_traces import find_traces, merge


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
