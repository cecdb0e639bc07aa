# SPDX-License-Identifier: Apache-2.0
"""Every family under layouts of two and four processes: transformers' greedy tokens and log-probabilities.

By default each row runs under one of its layouts of two processes, in turn; the others are slow.
"""

import pytest

from tests.families import decoding
from tests.families.rows import ROWS

TWO = [
    pytest.param(row.name, layout, marks=() if place == number % len(layouts) else pytest.mark.slow)
    for number, row in enumerate(ROWS.values())
    for layouts in [[layout for layout in row.layouts if layout in ("tp2", "pp2", "ep2", "vp2")]]
    for place, layout in enumerate(layouts)
]
FOUR = [(row.name, layout) for row in ROWS.values() for layout in row.four]


def check(pool, case, layout):
    found = pool.run(decoding.differences, case, layout, decoding.references(case))
    assert not any(found), "\n".join(dict.fromkeys(problem for problems in found for problem in problems))


@pytest.mark.parametrize(("name", "layout"), TWO)
def test_two_processes(two_workers, family_case, name, layout):
    check(two_workers, family_case(name), layout)


@pytest.mark.parametrize(("name", "layout"), FOUR)
def test_four_processes(four_workers, family_case, name, layout):
    check(four_workers, family_case(name), layout)
