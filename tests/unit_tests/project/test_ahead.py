# SPDX-License-Identifier: Apache-2.0
"""Results that threads compute before they are asked for."""

import threading

import pytest

from megatron.bridge.utils.ahead import ahead


class Calls:
    """Calls of 10 bytes each that count themselves."""

    def __init__(self, number, fail_at=None):
        self.begun = 0
        self._lock = threading.Lock()
        self.calls = [(10, lambda index=index: self._call(index, fail_at)) for index in range(number)]

    def _call(self, index, fail_at):
        with self._lock:
            self.begun += 1
        if index == fail_at:
            raise OSError("no such number")
        return index


@pytest.mark.parametrize("limit", [1, 10, 35, 1000])
@pytest.mark.parametrize("threads", [1, 3])
def test_all_come_in_order_and_no_more_than_fit_are_begun(limit, threads):
    calls, found = Calls(20), []
    for number in ahead(calls.calls, limit, threads):
        found.append(number)
        assert calls.begun <= number + max(limit // 10, 1)  # this one, and what fits beside it
    assert found == list(range(20))


def test_an_error_comes_in_its_turn_and_ends_it():
    calls, found = Calls(100, fail_at=3), []
    with pytest.raises(OSError, match="no such number"):
        found.extend(ahead(calls.calls, 30, 1))
    assert found == [0, 1, 2]
    assert calls.begun <= 6


def test_who_stops_early_leaves_no_thread():
    before = threading.active_count()
    numbers = ahead(Calls(100).calls, 50, 2)
    assert next(numbers) == 0
    numbers.close()
    assert threading.active_count() == before
