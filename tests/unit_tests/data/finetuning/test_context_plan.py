# SPDX-License-Identifier: Apache-2.0
"""Plans of which ranks share which samples: complete, in step, within memory, balanced, and the same everywhere."""

import numpy as np
import pytest

from megatron.bridge.data.finetuning.context_plan import (
    ContextSharing,
    plan_batch,
    sample_multiple,
    smallest_group,
)


def lengths_of_a_batch(seed, count=200, longest=4096):
    """Most samples are short, and a few are nearly as long as allowed."""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.normal(5.0, 1.3, count)).astype(int)
    return np.clip(lengths, 1, longest)


CASES = [(ranks, seed, multiple) for ranks in (1, 2, 8) for seed in range(4) for multiple in (1, 2)]


@pytest.mark.parametrize(("ranks", "seed", "multiple"), CASES)
def test_every_sample_is_in_one_microbatch_that_its_ranks_hold_at_the_same_place(
    ranks, seed, multiple
):
    lengths = lengths_of_a_batch(seed)
    sharing = ContextSharing(4096 // ranks, linear_work=1000, multiple=multiple)
    plan = plan_batch(lengths, ranks, sharing)
    (count,) = {len(microbatches) for microbatches in plan}
    seen = np.zeros(len(lengths), dtype=int)
    for place in range(count):
        rank = 0
        while rank < ranks:
            microbatch = plan[rank][place]
            members = range(rank, rank + microbatch.ranks)
            assert rank % microbatch.ranks == 0, "Megatron-Core has groups of neighbors only"
            assert all(plan[member][place] == microbatch for member in members)
            held = np.array([lengths[sample] for sample in microbatch.samples], dtype=int)
            unit = sample_multiple(multiple, microbatch.ranks)
            tokens = (-(-held // unit) * unit).sum()
            assert tokens <= microbatch.ranks * sharing.tokens_per_rank
            seen[list(microbatch.samples)] += 1
            rank += microbatch.ranks
    assert (seen == 1).all()


def work_of_ranks(plan, lengths, sharing):
    work = sharing.work(np.asarray(lengths))
    return np.array(
        [
            sum(work[list(batch.samples)].sum() / batch.ranks for batch in microbatches)
            for microbatches in plan
        ]
    )


@pytest.mark.parametrize("seed", range(4))
def test_ranks_have_about_as_much_work(seed):
    lengths = lengths_of_a_batch(seed)
    sharing = ContextSharing(512, linear_work=1000)
    done = work_of_ranks(plan_batch(lengths, 8, sharing), lengths, sharing)
    assert done.sum() == pytest.approx(sharing.work(lengths).sum())
    assert done.max() <= 1.02 * done.mean()


def test_a_sample_that_is_most_of_the_work_is_shared_although_one_rank_would_hold_it():
    lengths = [1000, 10, 10, 10]
    sharing = ContextSharing(1024, linear_work=0)
    plan = plan_batch(lengths, 4, sharing)
    assert plan[0][0].samples == (0,)
    assert plan[0][0].ranks == 4


def test_equal_samples_are_not_shared():
    plan = plan_batch([100] * 16, 8, ContextSharing(128, linear_work=50))
    assert {batch.ranks for microbatches in plan for batch in microbatches} == {1}
    assert {len(microbatches) for microbatches in plan} == {2}


def test_the_number_of_microbatches_can_be_a_multiple():
    sharing = ContextSharing(128, linear_work=0, microbatch_multiple=4)
    plan = plan_batch([100] * 5, 1, sharing)
    assert [len(batch.samples) for batch in plan[0]] == [1, 1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 1), (16, 1), (17, 2), (33, 4), (64, 4), (65, 8)])
def test_smallest_group(tokens, ranks):
    assert smallest_group(tokens, 16) == ranks
