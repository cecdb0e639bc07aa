# SPDX-License-Identifier: Apache-2.0
"""Results that threads compute before they are asked for."""

import gc
import subprocess
import sys
import threading
import time

import pytest

from megatron.bridge.utils.prefetch import PrefetchIterator, prefetch


class Calls:
    """Calls of 10 bytes each that count themselves."""

    def __init__(self, number, fail_at=None):
        self.begun = 0
        self._lock = threading.Lock()
        self.calls = [
            (10, lambda index=index: self._call(index, fail_at)) for index in range(number)
        ]

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
    for number in prefetch(calls.calls, limit, threads):
        found.append(number)
        assert calls.begun <= number + max(limit // 10, 1)  # this one, and what fits beside it
    assert found == list(range(20))


def test_an_error_comes_in_its_turn_and_ends_it():
    calls, found = Calls(100, fail_at=3), []
    with pytest.raises(OSError, match="no such number"):
        found.extend(prefetch(calls.calls, 30, 1))
    assert found == [0, 1, 2]
    assert calls.begun <= 6


def test_who_stops_early_leaves_no_thread():
    before = threading.active_count()
    numbers = prefetch(Calls(100).calls, 50, 2)
    assert next(numbers) == 0
    numbers.close()
    assert threading.active_count() == before


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.001)


class Source:
    """Numbers from 0; which were made, and by which thread."""

    def __init__(self, length=100, fail_at=None):
        self.made = []
        self.threads = set()
        self.length, self.fail_at = length, fail_at

    def __iter__(self):
        for number in range(self.length):
            if number == self.fail_at:
                raise OSError("no such number")
            self.threads.add(threading.current_thread())
            self.made.append(number)
            yield number


keeps = pytest.mark.parametrize("keep_thread", [True, False])


@keeps
def test_the_next_one_is_made_meanwhile_and_no_further_one(keep_thread):
    source = Source()
    numbers = PrefetchIterator(iter(source), keep_thread)
    for expected in range(20):
        wait_for(lambda done=expected: len(source.made) == done + 1)
        assert next(numbers) == expected
    wait_for(lambda: len(source.made) == 21)
    time.sleep(0.02)
    assert source.made == list(range(21))
    assert threading.current_thread() not in source.threads
    if keep_thread:
        assert len(source.threads) == 1
    else:
        wait_for(
            lambda: not any(thread.is_alive() for thread in source.threads)
        )  # with their OpenMP threads


@keeps
def test_the_end_and_an_error_come_in_their_turn_and_stay(keep_thread):
    assert list(PrefetchIterator(iter(Source(5)), keep_thread)) == list(range(5))
    ended = PrefetchIterator(iter(Source(0)), keep_thread)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ended)
    source = Source(fail_at=2)
    numbers = PrefetchIterator(iter(source), keep_thread)
    assert [next(numbers), next(numbers)] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="no such number"):
            next(numbers)
    del numbers
    gc.collect()
    wait_for(lambda: not any(thread.is_alive() for thread in source.threads))


@keeps
def test_nothing_more_is_made_when_it_is_let_go_of(keep_thread):
    source = Source()
    numbers = PrefetchIterator(iter(source), keep_thread)
    next(numbers)
    del numbers
    gc.collect()
    wait_for(lambda: not any(thread.is_alive() for thread in source.threads))
    assert len(source.made) <= 2


AT_THE_END = """
import os, time
from megatron.bridge.utils.prefetch import PrefetchIterator

def numbers():
    try:
        yield from range(100)
    finally:
        time.sleep(0.2)
        os.write(1, b"let go of")

kept = PrefetchIterator(numbers(), {keep_thread})
next(kept)
"""


@keeps
def test_its_thread_ends_before_the_interpreter(keep_thread):
    """Else it is killed wherever it is: within torch that is `terminate called without an active exception`."""
    script = AT_THE_END.format(keep_thread=keep_thread)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "let go of"
