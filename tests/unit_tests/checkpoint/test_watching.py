# SPDX-License-Identifier: Apache-2.0
"""Who is named when ranks hang or are slow; who dies with whom."""

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import TCPStore

from megatron.bridge.training.callbacks.guard import hang_detection
from megatron.bridge.training.callbacks.guard.hang_detection import (
    Heartbeat,
    current_function,
    find_culprit,
)
from megatron.bridge.training.callbacks.guard.straggler_detection import slow_ranks
from megatron.bridge.utils.processes import Process, start_time


def _signs(*ranks):
    """Two rounds of signs; a rank is (moves, where, waits) or None if it gives no new sign."""
    before, after = [], []
    for entry in ranks:
        moves, where, waits = entry or (5, "x", False)
        before.append(Heartbeat(1, moves, 2, where, waits))
        after.append(Heartbeat(1 if entry is None else 2, moves, 2, where, waits))
    return before, after


WAITS = (7, "all_reduce (distributed_c10d.py:1)", True)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([WAITS, None, WAITS], "rank 1 sends no heartbeat"),
        ([WAITS, WAITS, (6, "load (data.py:9)", False)], "waiting for rank 2, which is in load"),
        ([WAITS, (5, "all_gather (x.py:3)", True)], "rank 1 is behind the others, in all_gather"),
        ([WAITS, WAITS], "all ranks are in all_reduce"),
    ],
)
def test_the_culprit_of_a_hang_is_named(ranks, words):
    assert words in find_culprit(*_signs(*ranks))


def test_a_rank_that_never_gave_a_sign_is_named():
    before, after = _signs(WAITS, WAITS)
    assert find_culprit([before[0], None], [after[0], None]).startswith("rank 1 sends no heartbeat")


def test_where_a_thread_is():
    import threading

    where, waits = current_function(threading.get_ident())
    assert "current_function" in where or "test_where" in where
    assert not waits


SERVES = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_stopped_process_that_keeps_the_store_stops_nobody_else(monkeypatch):
    server = subprocess.Popen([sys.executable, "-c", SERVES], stdout=subprocess.PIPE, text=True)
    try:
        store = TCPStore("127.0.0.1", int(server.stdout.readline()), None, False)
        monkeypatch.setattr(hang_detection, "STORE_TIMEOUT", 0.2)
        monkeypatch.setattr(hang_detection.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(hang_detection.distributed, "world_size", lambda: 2)
        monkeypatch.setattr(hang_detection.distributed, "rank", lambda: 0)
        monkeypatch.setattr(hang_detection.distributed_c10d, "_get_default_store", lambda: store)
        os.kill(server.pid, signal.SIGSTOP)  # before this rank has a connection of its own
        began = time.monotonic()
        store_of_rank = hang_detection._HeartbeatStore()
        store_of_rank.publish(1, 2, "here", True)
        assert store_of_rank.heartbeats() == [Heartbeat(1, 1, 2, "here", True), None]
        assert time.monotonic() - began < 100, "the store waits 300 s for an answer"
    finally:
        server.kill()


def test_the_slow_rank_is_named():
    assert slow_ranks([(0.1, "a"), (0.12, "a")], 1.5) == []
    found = slow_ranks([(0.1, "a"), (0.1, "a"), (0.4, "b"), (0.1, "b")], 1.5)
    (message,) = found
    assert message.startswith("rank 2 on b is slow: 0.400 s per step")
    assert message.endswith("4.0 times the median")
    assert slow_ranks([(0.2, "a")], 1.0) == [], "alone, nobody is slow"


CHILD = """
import signal, subprocess, sys, time
code = "from megatron.bridge.utils.processes import die_with_parent as d; import signal, time;"
code += "d(signal.SIGKILL); print('ready', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_dies_with_the_one_that_started_it():
    parent = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert start_time(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 120
    while start_time(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not start_time(child)


def test_this_process_is_alive():
    assert Process.current().is_here
    assert Process.current().is_alive
