# SPDX-License-Identifier: Apache-2.0
"""The order of samples against naive lists, for any layout and any place to resume."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.bridge.data.samplers import (
    BalancedSampler,
    MegatronPretrainingBatchSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)


@st.composite
def layouts(draw):
    """(micro batch, ranks, microbatches in a step, total samples, completed steps)."""
    micro, ranks, accumulation = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )
    batch = micro * ranks * accumulation
    total = draw(st.integers(batch, 5 * batch + 3))
    return micro, ranks, accumulation, total, draw(st.integers(0, total // batch))


def global_batches(samplers, accumulation, count):
    """What all ranks draw, put together step by step in the order of microbatches and ranks."""
    draws = [iter(sampler) for sampler in samplers]
    batches = []
    for _ in range(count):
        batch = []
        for _ in range(accumulation):
            for draw in draws:
                batch += next(draw)
        batches.append(batch)
    return batches


@given(layouts())
def test_global_batch_k_is_the_kth_slice(layout):
    micro, ranks, accumulation, total, steps = layout
    batch = micro * ranks * accumulation
    samplers = [
        MegatronPretrainingSampler(total, steps * batch, micro, rank, ranks)
        for rank in range(ranks)
    ]
    left = total // batch - steps
    expected = [list(range(k * batch, (k + 1) * batch)) for k in range(steps, steps + left)]
    assert global_batches(samplers, accumulation, left) == expected


@given(layouts())
def test_incomplete_draws_are_dropped_or_kept_as_asked(layout):
    micro, ranks, _, total, _ = layout
    dropped = [
        list(MegatronPretrainingSampler(total, 0, micro, rank, ranks)) for rank in range(ranks)
    ]
    kept = [
        list(MegatronPretrainingSampler(total, 0, micro, rank, ranks, drop_last=False))
        for rank in range(ranks)
    ]
    stride = micro * ranks
    assert {len(draws) for draws in dropped} == {total // stride}
    assert all(len(ids) == micro for draws in dropped for ids in draws)
    assert sorted(i for draws in kept for ids in draws for i in ids) == list(range(total))


@given(layouts())
def test_samples_of_a_global_batch_are_dealt_out_one_by_one(layout):
    micro, ranks, accumulation, total, steps = layout
    batch = micro * ranks * accumulation
    samplers = [
        MegatronPretrainingBatchSampler(total, steps * batch, micro, batch, rank, ranks)
        for rank in range(ranks)
    ]
    draws = [list(sampler) for sampler in samplers]
    assert {len(mine) for mine in draws} == {(total // batch - steps) * accumulation}
    for step in range(total // batch - steps):
        whole = list(range((steps + step) * batch, (steps + step + 1) * batch))
        for rank, mine in enumerate(draws):
            microbatches = mine[step * accumulation : (step + 1) * accumulation]
            assert all(len(ids) == micro for ids in microbatches)
            assert sum(microbatches, []) == whole[rank::ranks]  # noqa: RUF017


@given(layouts(), st.integers(1, 4), st.integers(1, 4))
def test_a_run_goes_on_under_another_layout(layout, other_ranks, other_micro):
    """What was consumed is counted over all ranks: another number of them sees the next samples, each once."""
    micro, ranks, accumulation, total, steps = layout
    batch = micro * ranks * accumulation
    other = other_ranks * other_micro
    samplers = [
        MegatronPretrainingSampler(total, steps * batch, other_micro, rank, other_ranks)
        for rank in range(other_ranks)
    ]
    left = (total - steps * batch) // other
    drawn = [index for step in global_batches(samplers, 1, left) for index in step]
    assert drawn == list(range(steps * batch, steps * batch + left * other))


@given(layouts(), st.integers(1, 3), st.integers(1, 3))
def test_a_run_goes_on_with_another_global_batch(layout, other_ranks, other_accumulation):
    """What was consumed is counted in samples: the next batch begins behind them, whatever its size."""
    micro, ranks, accumulation, total, steps = layout
    consumed, batch = steps * micro * ranks * accumulation, micro * other_ranks * other_accumulation
    samplers = [
        MegatronPretrainingBatchSampler(total, consumed, micro, batch, rank, other_ranks)
        for rank in range(other_ranks)
    ]
    left = (total - consumed) // batch
    found = [sorted(drawn) for drawn in global_batches(samplers, other_accumulation, left)]
    starts = range(consumed, consumed + left * batch, batch)
    assert found == [list(range(start, start + batch)) for start in starts]


def random_order(total, batch, seed, steps):
    """Global batches of the shuffled order, written down epoch by epoch."""
    flat, epoch = [], 0
    while len(flat) < steps * batch:
        flat += (
            np.random.default_rng((seed, epoch))
            .permutation(total)[: total // batch * batch]
            .tolist()
        )
        epoch += 1
    return [flat[k * batch : (k + 1) * batch] for k in range(steps)]


@given(layouts(), st.integers(0, 2**31))
def test_random_order_does_not_depend_on_the_layout(layout, seed):
    micro, ranks, accumulation, total, steps = layout
    batch = micro * ranks * accumulation
    samplers = [
        MegatronPretrainingRandomSampler(
            None, total, steps * batch, micro, rank, ranks, seed=seed, global_batch_size=batch
        )
        for rank in range(ranks)
    ]
    expected = random_order(total, batch, seed, steps + 7)[steps:]
    assert global_batches(samplers, accumulation, 7) == expected


@given(layouts())
def test_sharded_epoch_visits_every_sample_of_each_ranks_part_once(layout):
    micro, ranks, accumulation, total, _ = layout
    batch = micro * ranks * accumulation
    per_rank = total // batch * batch // ranks
    for rank in range(ranks):
        sampler = MegatronPretrainingRandomSampler(
            None, total, 0, micro, rank, ranks, data_sharding=True, global_batch_size=batch
        )
        draws = iter(sampler)
        seen = [index for _ in range(per_rank // micro) for index in next(draws)]
        assert sorted(seen) == list(range(rank * per_rank, (rank + 1) * per_rank))


@given(layouts(), st.booleans())
def test_random_order_resumes_where_it_stopped(layout, sharded):
    micro, ranks, accumulation, total, steps = layout
    batch = micro * ranks * accumulation

    def sampler(consumed):
        return iter(
            MegatronPretrainingRandomSampler(
                None,
                total,
                consumed,
                micro,
                0,
                ranks,
                data_sharding=sharded,
                global_batch_size=batch,
            )
        )

    whole, resumed = sampler(0), sampler(steps * batch)
    for _ in range(steps * accumulation):
        next(whole)
    assert [next(whole) for _ in range(8)] == [next(resumed) for _ in range(8)]


@given(layouts(), st.lists(st.integers(0, 50), min_size=1, max_size=70))
def test_a_balanced_global_batch_has_the_same_samples(layout, costs):
    micro, ranks, accumulation, total, steps = layout
    batch = micro * ranks * accumulation
    sizes = (total, steps * batch, micro, batch)
    samplers = [
        BalancedSampler(lambda k: costs[k % len(costs)], *sizes, rank, ranks)
        for rank in range(ranks)
    ]
    left = total // batch - steps
    found = global_batches(samplers, accumulation, left)
    assert [sorted(ids) for ids in found] == [
        list(range(k * batch, (k + 1) * batch)) for k in range(steps, total // batch)
    ]


def test_2000_mixed_images_are_balanced_over_ranks():
    """The largest rank's patches over the mean, averaged over global batches of 64 images on 8 ranks."""
    rng = np.random.default_rng(0)
    sides = rng.lognormal(np.log(700), 0.6, (2000, 2)).clip(56, 3000)  # from icons to photographs
    costs = (sides // 28).prod(1).astype(int)

    def unbalance(make):
        draws = [list(make(rank)) for rank in range(8)]
        steps = [
            [
                sum(costs[i] for ids in ranks for i in ids)
                for ranks in zip(*[iter(draw)] * 4, strict=False)
            ]
            for draw in draws
        ]
        work = np.array(steps)
        return float((work.max(0) / work.mean(0)).mean())

    usual = unbalance(lambda rank: MegatronPretrainingSampler(2000, 0, 2, rank, 8))
    balanced = unbalance(
        lambda rank: BalancedSampler(lambda k: int(costs[k]), 2000, 0, 2, 64, rank, 8)
    )
    assert balanced <= 1.1 < 1.5 < usual
    print(f"max/mean {usual:.2f} in random order, {balanced:.3f} balanced")  # noqa: T201
