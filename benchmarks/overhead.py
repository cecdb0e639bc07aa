# SPDX-License-Identifier: Apache-2.0
"""What the framework adds to a step: its loop against a bare Megatron-Core loop over the same model and optimizer.

``python benchmarks/overhead.py`` takes steps of both in one process in pairs, every other pair in the opposite
order, and prints the median of the pairs' differences with its 95 % interval (bootstrap), in wall and in CPU time:
a machine that is slow for a while is slow for both steps of a pair. The framework's step has its default callbacks
and draws its own data; the bare one has the same batch every time.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from measure import table
from training import Candidate, bare_loop, framework_loop, hf_config, megatron_run, now, shapes

Times = tuple[float, float]  # wall and CPU seconds of a step


def one_step(candidate: Candidate) -> Times:
    """From its start to its end."""
    before = now()
    (after,) = candidate(1)
    return after[0] - before[0], after[1] - before[1]


def pairs(bare: Candidate, framework: Candidate, count: int) -> list[tuple[Times, Times]]:
    """Steps side by side, the bare one first in each."""
    found = []
    for number in range(count):
        if number % 2:
            second, first = one_step(framework), one_step(bare)
        else:
            first, second = one_step(bare), one_step(framework)
        found.append((first, second))
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median of ``values``: where 95 % of the medians of samples drawn from them lie."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (2000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def rows(found: list[tuple[Times, Times]]) -> list[list[str]]:
    """One for wall and one for CPU time."""
    lines = []
    for place, kind in enumerate(("wall", "CPU")):
        bare = statistics.median(first[place] for first, _ in found)
        added = [(second[place] - first[place]) / bare for first, second in found]
        low, high = interval(added)
        cells = [
            f"{bare * 1e3:.1f}",
            f"{statistics.median(added):+.2%}",
            f"{low:+.2%} to {high:+.2%}",
        ]
        lines.append([kind, *cells])
    return lines


def main() -> None:
    """Measure each precision and print its table."""
    parser = shapes(__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for precision in args.precision:
        found = measured(args, precision == "bf16")
        print(
            f"\n{args.size}, {precision}, {args.micro_batch_size} x {args.seq_length} tokens, {len(found)} pairs\n"
        )
        print(
            table(["", "bare loop: ms", "the framework adds", "95 % interval"], rows(found)),
            flush=True,
        )


def measured(args: argparse.Namespace, bf16: bool) -> list[tuple[Times, Times]]:
    """Pairs of steps, after two that are not counted."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(hf_config(args.size, args.seq_length)).save_pretrained(directory)
        run = megatron_run(Path(directory), args, bf16)
    bare, framework = bare_loop(run, args), framework_loop(run)
    pairs(bare, framework, 2)
    return pairs(bare, framework, args.pairs)


if __name__ == "__main__":
    main()
