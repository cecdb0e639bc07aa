# SPDX-License-Identifier: Apache-2.0
"""Each row of a sampled matrix runs on one of a few days in a row."""

from datetime import date, timedelta

from tests.conftest import SHARE, is_in_sample


def test_every_row_has_its_day():
    names = [f"tests/test_matrix.py::test_row[{index}]" for index in range(200)]
    days = [(date(2026, 2, 27) + timedelta(days=index)).isoformat() for index in range(SHARE)]
    samples = [{name for name in names if is_in_sample(name, day)} for day in days]
    assert sum(map(len, samples)) == len(names)
    assert set().union(*samples) == set(names)
    # none of them is nearly empty, so that no day is without a test of a matrix
    assert min(map(len, samples)) > len(names) / SHARE / 2
