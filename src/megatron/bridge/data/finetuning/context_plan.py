# SPDX-License-Identifier: Apache-2.0
"""How the samples of a global batch are shared out: a long one among many ranks, a short one on a rank of its own.

Megatron-Core calls it hybrid context parallelism. Ranks are those of data parallelism. They form groups of 1, 2, 4, ...
neighbors, and each group takes samples whose attention it computes together. All ranks have the same number of
microbatches, and those that share a microbatch have it at the same place, so pipeline stages and sharded weights stay
in step. A plan depends on the lengths alone: every rank computes the same one, and so does a resumed run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.bridge.data.finetuning.packing import pack, rounded_up


@dataclass(frozen=True)
class ContextSharing:
    """What a plan depends on besides the lengths of the samples.

    Attributes:
        tokens_per_rank: The most tokens of a microbatch that one rank holds.
        linear_work: Work of a token besides attention, in units of the work of attending to one token.
        multiple: Each rank's part of a sample is padded to a multiple of this.
        microbatch_multiple: The number of microbatches is a multiple of this, for interleaved pipeline stages.
    """

    tokens_per_rank: int
    linear_work: int
    multiple: int = 1
    microbatch_multiple: int = 1

    def padded(self, lengths: np.ndarray, ranks: int) -> np.ndarray:
        """Lengths of samples that ``ranks`` ranks share, each of which holds one early and one late chunk."""
        return rounded_up(lengths, sample_multiple(self.multiple, ranks))

    def work(self, lengths: np.ndarray) -> np.ndarray:
        """Work of each sample: attention grows with the square of the length, everything else with the length."""
        tokens = lengths.astype(np.float64)
        return tokens * (tokens + self.linear_work)


class PlannedMicrobatch(NamedTuple):
    """A microbatch of a rank."""

    samples: tuple[int, ...]
    """Indices into the global batch; none: the rank waits in this microbatch, which is padding."""
    ranks: int = 1
    """How many neighboring ranks share it."""


IDLE = PlannedMicrobatch(())
Plan = list[list[PlannedMicrobatch]]
"""The microbatches of each rank."""


def sample_multiple(multiple: int, ranks: int) -> int:
    """The divisor of the length of a sample that ``ranks`` ranks share."""
    return multiple if ranks == 1 else 2 * ranks * multiple


def smallest_group(tokens: int, tokens_per_rank: int) -> int:
    """The smallest power of two of ranks that hold so many tokens.

    Example:
        >>> smallest_group(50_000, 16_384)
        4
    """
    parts = -(-tokens // tokens_per_rank)
    return 1 << (parts - 1).bit_length()


def plan_batch(lengths: Sequence[int] | np.ndarray, ranks: int, sharing: ContextSharing) -> Plan:
    """Distribute the samples of a global batch over ``ranks`` ranks, a power of two.

    The longest sample comes first, and each goes to the group of ranks with the least work so far.

    Example:
        >>> plan = plan_batch([40, 8, 6, 6], 4, ContextSharing(tokens_per_rank=16, linear_work=0))
        >>> for rank in plan:
        ...     print([(microbatch.samples, microbatch.ranks) for microbatch in rank])
        [((0,), 4), ((1,), 1)]
        [((0,), 4), ((2,), 1)]
        [((0,), 4), ((3,), 1)]
        [((0,), 4), ((), 1)]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert ranks & (ranks - 1) == 0, f"{ranks} ranks are no power of two"
    assert sizes.max() <= ranks * sharing.tokens_per_rank, "a sample does not fit"
    shares = _ranks_of_samples(sizes, ranks, sharing)
    held = _samples_of_groups(sizes, shares, ranks, sharing)
    rows = {group: _pack_rows(samples, sizes, group[1], sharing) for group, samples in held.items()}
    plan = _in_step(rows, 0, ranks)
    missing = -len(plan[0]) % sharing.microbatch_multiple
    return [[*microbatches, *[IDLE] * missing] for microbatches in plan]


def _ranks_of_samples(sizes: np.ndarray, ranks: int, sharing: ContextSharing) -> np.ndarray:
    """How many ranks share each sample: as few as hold it, and enough that none does more than an equal share."""
    work = sharing.work(sizes)
    equal_share = work.sum() / ranks
    shares = np.ones(len(sizes), dtype=np.int64)
    while True:
        is_too_long = sizes > shares * sharing.tokens_per_rank
        is_too_much = work > shares * equal_share * (1 + 1e-9)
        grows = (is_too_long | is_too_much) & (shares < ranks)
        if not grows.any():
            return shares
        shares[grows] *= 2


def _samples_of_groups(
    sizes: np.ndarray, shares: np.ndarray, ranks: int, sharing: ContextSharing
) -> dict[tuple[int, int], list[int]]:
    """The samples of each group of ranks, by its first rank and its size."""
    work_per_rank = sharing.work(sizes) / shares
    done = np.zeros(ranks)
    held: dict[tuple[int, int], list[int]] = {}
    # by the number of ranks, then by work, then by place: never by chance
    for sample in np.lexsort((np.arange(len(sizes)), -work_per_rank, -shares)).tolist():
        size = int(shares[sample])
        busiest = done.reshape(-1, size).max(axis=1)
        first = int(busiest.argmin()) * size
        done[first : first + size] += work_per_rank[sample]
        held.setdefault((first, size), []).append(sample)
    return held


def _pack_rows(
    samples: list[int], sizes: np.ndarray, ranks: int, sharing: ContextSharing
) -> list[PlannedMicrobatch]:
    """Microbatches of a group of ranks: as many samples in each as its ranks hold."""
    members = np.array(sorted(samples))
    padded = sharing.padded(sizes[members], ranks)
    return [
        PlannedMicrobatch(tuple(members[row].tolist()), ranks)
        for row in pack(padded, ranks * sharing.tokens_per_rank)
    ]


def _in_step(
    rows: dict[tuple[int, int], list[PlannedMicrobatch]], first: int, size: int
) -> list[list[PlannedMicrobatch]]:
    """The microbatches of ``size`` ranks: those that all of them share, then those of each half side by side."""
    shared = rows.get((first, size), [])
    if size == 1:
        return [shared]
    half = size // 2
    parts = _in_step(rows, first, half) + _in_step(rows, first + half, half)
    length = max(map(len, parts))
    return [[*shared, *part, *[IDLE] * (length - len(part))] for part in parts]
