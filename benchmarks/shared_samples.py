# SPDX-License-Identifier: Apache-2.0
"""How evenly ranks share the work of long and short samples, with fixed and with planned context parallelism.

``python -m benchmarks shared_samples`` draws the lengths of a long-context mix (nine of ten samples are chats,
log-normal around 600 tokens; the tenth is log-uniform from 8,000 tokens to the longest) and plans steps of packed
rows. With ``--lengths FILE`` it reads lengths, one in a line. ``fixed`` is one size of context parallelism for all
samples, the smallest that holds the longest; rows go to replicas in their order. ``planned`` is
``model.hybrid_context_parallel``.

Work is that of the step: attention, which grows with the square of a sample, and everything else.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.bridge.data.finetuning.context_plan import ContextSharing, plan_batch, smallest_group
from megatron.bridge.data.finetuning.packing import pack
from megatron.bridge.training.config.resolve.context_sharing import LINEAR_WORK


class Step(NamedTuple):
    """What a step costs."""

    slowest: float  # work of the rank with most of it, relative to an equal share
    received: float  # keys and values that a rank gets from others, relative to its own
    padding: float  # share of the tokens that ranks compute and that are padding
    seconds: float  # of planning


def mixed_lengths(count: int, longest: int) -> np.ndarray:
    """Lengths of samples, most of them short."""
    random = np.random.default_rng(0)
    chats = np.exp(random.normal(np.log(600), 1.0, count))
    documents = np.exp(random.uniform(np.log(8000), np.log(longest), count))
    lengths = np.where(random.random(count) < 0.9, chats, documents)
    return np.clip(lengths, 16, longest).astype(np.int64)


def fixed_step(lengths: list[np.ndarray], ranks: int, size: int, sharing: ContextSharing) -> Step:
    """A step of rows of samples on ``ranks`` ranks, of which ``size`` share every sample."""
    replicas = ranks // size
    work = np.array([sharing.work(row).sum() for row in lengths])
    of_replica = work.reshape(-1, replicas).sum(axis=0)
    tokens = sum(int(row.sum()) for row in lengths)
    computed = sum(int(sharing.padded(row, size).sum()) for row in lengths)
    return Step(of_replica.max() / of_replica.mean(), size - 1, 1 - tokens / computed, 0.0)


def planned_step(lengths: list[np.ndarray], ranks: int, sharing: ContextSharing) -> Step:
    """The same step by a plan."""
    samples = np.concatenate(lengths)
    start = time.perf_counter()
    plan = plan_batch(samples, ranks, sharing)
    seconds = time.perf_counter() - start
    work = sharing.work(samples)
    of_rank = np.zeros(ranks)
    computed = received = 0.0
    for rank, microbatches in enumerate(plan):
        for microbatch in microbatches:
            members = list(microbatch.samples)
            of_rank[rank] += work[members].sum() / microbatch.ranks
            held = sharing.padded(samples[members], microbatch.ranks).sum() / microbatch.ranks
            computed += held
            received += held * (microbatch.ranks - 1)
    padding = 1 - samples.sum() / computed
    return Step(of_rank.max() / of_rank.mean(), received / computed, padding, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description="How evenly ranks share the work.")
    parser.add_argument("--lengths", type=Path, help="file with a length in each line")
    parser.add_argument("--row", type=int, default=131_072, help="tokens of a packed row")
    parser.add_argument("--tokens-per-rank", type=int, default=16_384)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden-size", type=int, default=4096)
    options = parser.parse_args()
    if options.lengths is None:
        lengths = mixed_lengths(40_000, options.row)
    else:
        lengths = np.array([int(line) for line in options.lengths.read_text().split()])
        lengths = lengths.clip(1, options.row)
    sharing = ContextSharing(options.tokens_per_rank, LINEAR_WORK * options.hidden_size)
    size = smallest_group(options.row, options.tokens_per_rank)
    rows = pack(sharing.padded(lengths, size), options.row)
    order = np.random.default_rng(0).permutation(len(rows))
    steps = min(options.steps, len(rows) // options.rows)
    shared_by = "1 rank" if size == 1 else f"{size} ranks"
    found: dict[str, list[Step]] = {f"fixed, {shared_by} for every sample": [], "planned": []}
    fixed, planned = found.values()
    for step in range(steps):
        chosen = order[step * options.rows : (step + 1) * options.rows]
        of_step = [lengths[rows[row]] for row in chosen]
        fixed.append(fixed_step(of_step, options.ranks, size, sharing))
        planned.append(planned_step(of_step, options.ranks, sharing))
    print(
        f"{len(lengths):,} samples, median {int(np.median(lengths)):,}, longest {lengths.max():,} tokens; "
        f"{steps} steps of {options.rows} rows of {options.row:,} tokens on {options.ranks} ranks"
    )
    print("| | slowest rank, mean | worst step | keys received | padding | planning of a step |")
    print("|---|---|---|---|---|---|")
    for name, all_steps in found.items():
        slowest = np.array([step.slowest for step in all_steps])
        received, padding, seconds = (
            np.mean([getattr(step, field) for step in all_steps])
            for field in ("received", "padding", "seconds")
        )
        print(
            f"| {name} | {slowest.mean():.2f} | {slowest.max():.2f} | {received:.1f} | {padding:.2%} | "
            f"{1e3 * seconds:.0f} ms |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
