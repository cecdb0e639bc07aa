# SPDX-License-Identifier: Apache-2.0
"""Balanced stages against all divisions of a few layers."""

import itertools

import pytest

from megatron.bridge.autotune.search.price import balanced, spelled


def slowest(times, counts, last):
    ends = [*itertools.accumulate(counts)]
    sums = [sum(times[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    return max([*sums[:-1], sums[-1] + last])


@pytest.mark.parametrize(
    "times", [[1.0] * 9, [1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0], [5.0, 1.0, 1.0, 1.0, 1.0, 4.0]]
)
@pytest.mark.parametrize("last", [0.0, 1.5, 4.0])
def test_balanced_is_the_best_division(times, last):
    parts = 4
    every = [
        counts
        for counts in itertools.product(range(len(times) + 1), repeat=parts)
        if sum(counts) == len(times) and all(counts[:-1])
    ]
    best = min(slowest(times, counts, last) for counts in every)
    found = balanced(times, parts, last)
    assert sum(found) == len(times)
    assert slowest(times, found, last) == pytest.approx(best)


def test_too_few_layers():
    assert balanced([1.0, 1.0], 4, 1.0) is None
    assert balanced([1.0, 1.0, 1.0], 4, 1.0) == [1, 1, 1, 0]


def test_spelled():
    assert spelled([2, 2, 0], 0) == "Ett|tt|L"
