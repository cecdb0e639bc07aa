# SPDX-License-Identifier: Apache-2.0
"""Every family under every layout it allows: transformers' logits and gradients, and the same bytes back."""

import pytest

from tests.families import harness
from tests.families.rows import ROWS

COVERED = {"tp2": "sp2", "pp2": "vp2"}
"""Slow where the row runs the other one, which cuts weights and layers the same way and does more with them."""

TWO = [
    pytest.param(row.name, layout, marks=[pytest.mark.slow] * (COVERED.get(layout) in row.layouts))
    for row in ROWS.values()
    for layout in row.layouts
]
TWO += [
    pytest.param(row.name, layout, marks=pytest.mark.slow)
    for row in ROWS.values()
    for layout in row.slow
]
FOUR = [(row.name, layout) for row in ROWS.values() for layout in row.four]


def check(pool, case, layout, output):
    found = pool.run(harness.numbers_and_bytes, case, layout, output)
    assert not any(found), "\n".join(
        dict.fromkeys(problem for problems in found for problem in problems)
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "layout"), TWO)
def test_two_processes(two_workers, family_case, tmp_path, name, layout):
    check(two_workers, family_case(name), layout, tmp_path / "out")


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "layout"), FOUR)
def test_four_processes(four_workers, family_case, tmp_path, name, layout):
    check(four_workers, family_case(name), layout, tmp_path / "out")
