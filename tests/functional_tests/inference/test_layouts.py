# SPDX-License-Identifier: Apache-2.0
"""Every family under layouts of two and four processes: transformers' greedy tokens and log-probabilities.

By default the first row of each family runs under one of its layouts of two processes, in turn. The other rows and
layouts are slow: one process has proven the rows, and the layouts of training share their layers.
"""

import pytest

from tests.families import decoding
from tests.families.rows import ROWS

FIRST = {row.model: row.name for row in reversed(ROWS.values())}
FOUR_IN_CI = {("deepseek_v3", "tp2ep2"), ("gemma2", "tp2pp2"), ("nemotron_h", "tp2pp2"), ("qwen3_next", "tp2ep2")}


def two_processes():
    for number, row in enumerate(ROWS.values()):
        layouts = [layout for layout in row.layouts if layout in ("tp2", "pp2", "ep2", "vp2")]
        for place, layout in enumerate(layouts):
            by_default = row.name == FIRST[row.model] and place == number % len(layouts)
            yield pytest.param(row.name, layout, marks=() if by_default else pytest.mark.slow)


def four_processes():
    for row in ROWS.values():
        for layout in row.four:
            marks = () if (row.name, layout) in FOUR_IN_CI else pytest.mark.slow
            yield pytest.param(row.name, layout, marks=marks)


def check(pool, case, layout):
    found = pool.run(decoding.differences, case, layout, decoding.references(case))
    assert not any(found), "\n".join(dict.fromkeys(problem for problems in found for problem in problems))


@pytest.mark.parametrize(("name", "layout"), two_processes())
def test_two_processes(two_workers, family_case, name, layout):
    check(two_workers, family_case(name), layout)


@pytest.mark.parametrize(("name", "layout"), four_processes())
def test_four_processes(four_workers, family_case, name, layout):
    check(four_workers, family_case(name), layout)
