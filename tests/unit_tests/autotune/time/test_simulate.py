# SPDX-License-Identifier: Apache-2.0
"""The simulator against closed forms and against itself on long schedules; collectives against a hand count."""

import random

import pytest

from megatron.bridge.autotune.gpus import gpu
from megatron.bridge.autotune.time.collectives import (
    NETWORK_EFFICIENCY,
    NVLINK_EFFICIENCY,
    AlphaBeta,
    CollectiveGroup,
)
from megatron.bridge.autotune.time.kernels import Roofline
from megatron.bridge.autotune.time.schedule import Pipeline
from megatron.bridge.autotune.time.simulate import PassTimes, bound, makespan, simulate


def equal(pipeline, forward, backward):
    chunks = pipeline.chunks
    rows = [
        tuple((seconds / chunks,) * chunks for _ in range(pipeline.stages))
        for seconds in (forward, backward)
    ]
    return PassTimes(*rows)


@pytest.mark.parametrize(
    "pipeline",
    [Pipeline(1, 5), Pipeline(4, 16), Pipeline(8, 8), Pipeline(4, 16, 2, 4), Pipeline(4, 12, 3, 4)],
)
def test_equal_stages_take_the_time_of_the_closed_form(pipeline):
    """Narayanan et al. (2021): m (f + b) + (p - 1) (f + b) / v."""
    expected = 3.0 * pipeline.microbatches + 3.0 * (pipeline.stages - 1) / pipeline.chunks
    spans = simulate(pipeline, equal(pipeline, 1.0, 2.0))
    assert max(span.end for span in spans) == pytest.approx(expected)
    busy = sum(span.end - span.start for span in spans if span.stage == 0)
    assert busy == pytest.approx(3.0 * pipeline.microbatches)


def test_fewer_microbatches_than_stages_wait_for_the_way_there_and_back():
    pipeline = Pipeline(4, 1)
    assert makespan(pipeline, equal(pipeline, 1.0, 2.0)) == pytest.approx(12.0)


@pytest.mark.parametrize(
    "pipeline", [Pipeline(4, 64, 2, 4), Pipeline(4, 61), Pipeline(2, 51, 3, 3)]
)
def test_long_schedules_repeat(pipeline):
    numbers = random.Random(0)
    rows = [
        tuple(numbers.uniform(1, 2) for _ in range(pipeline.chunks))
        for _ in range(2 * pipeline.stages)
    ]
    times = PassTimes(tuple(rows[: pipeline.stages]), tuple(rows[pipeline.stages :]), message=0.1)
    exact = max(span.end for span in simulate(pipeline, times))
    assert makespan(pipeline, times) == pytest.approx(exact, rel=5e-3)  # the drain is not periodic
    assert bound(pipeline, times) == pytest.approx(exact, rel=0.05)


def test_no_pass_starts_before_its_input():
    pipeline = Pipeline(3, 6, 2, 3)
    spans = simulate(pipeline, equal(pipeline, 1.0, 2.0))
    ends = {
        (span.work.kind, span.work.chunk * 3 + span.stage, span.work.microbatch): span.end
        for span in spans
    }
    for (kind, position, microbatch), end in ends.items():
        before = ("forward", position - 1) if kind == "forward" else ("backward", position + 1)
        if (*before, microbatch) in ends:
            assert end > ends[(*before, microbatch)]


def test_the_first_stage_receives_in_the_order_in_which_the_last_sends():
    """Groups larger than the pipeline: Megatron-Core waits for a tensor of the second chunk before it goes on."""
    slow = PassTimes(((1.0, 1.0), (5.0, 1.0)), ((1.0, 1.0), (1.0, 1.0)))
    spans = simulate(Pipeline(2, 4, chunks=2, group=4), slow)
    first = [
        span
        for span in spans
        if span.stage == 0 and span.work.kind == "forward" and span.work.chunk == 0
    ]
    assert [span.start for span in first] == [0.0, 1.0, 6.0, 11.0]


def test_collectives_use_the_slowest_link_that_they_cross():
    card = gpu("H100 80GB")
    links, size = AlphaBeta(card), 1e9
    inside = links.all_gather(size, CollectiveGroup(8))
    assert inside == pytest.approx(size * 7 / 8 / (450e9 * NVLINK_EFFICIENCY), rel=0.01)
    across = links.all_gather(size, CollectiveGroup(16, stride=8))
    assert across == pytest.approx(size * 15 / 16 / (50e9 * NETWORK_EFFICIENCY), rel=0.01)
    assert links.all_gather(size, CollectiveGroup(1)) == 0
    assert (
        AlphaBeta(gpu("GB200 186GB")).all_to_all(size, CollectiveGroup(64))
        < links.all_to_all(size, CollectiveGroup(64)) / 4
    )


def test_matrix_products_are_bound_by_operations_or_by_bytes():
    kernels = Roofline(gpu("H100 80GB"))
    large = kernels.matrix(8192, 8192, 8192)
    assert 0.6 < 2 * 8192**3 / large / kernels.card.bf16 < 0.75
    assert kernels.matrix(1, 8192, 8192) > 2 * 8192**2 / kernels.bandwidth
    assert Roofline(gpu("H100 80GB"), "fp8").matrix(8192, 8192, 8192) < large / 1.6
