# SPDX-License-Identifier: Apache-2.0
"""Of any number of processes that take over one lock, exactly one gets it."""

import itertools
import json
import multiprocessing
import os
import shutil
import sys
from dataclasses import asdict, replace

import pytest

from megatron.bridge.checkpoint import lock
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.processes import Process

CONTEXT = multiprocessing.get_context("fork")
CONTENDERS = 8
OPERATIONS = 6  # on the lock, of one takeover


def _die_holding(root):
    lock.acquire(root)
    os._exit(0)


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """A folder whose lock is held by a process that was killed."""
    root = tmp_path_factory.mktemp("left") / "root"
    process = CONTEXT.Process(target=_die_holding, args=(root,))
    process.start()
    process.join()
    return root


def _acquired(root):
    try:
        return lock.acquire(root)
    except UserError:
        return False


class Contender:
    """A process that acquires ``root``, and stops before chosen ones of its own operations on the lock."""

    def __init__(self, root, stops=()):
        self._pipe, there = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=self._run, args=(root, stops, there), daemon=True)
        self._process.start()

    def _run(self, root, stops, pipe):
        operations = itertools.count()
        path = os.fspath(root / lock.NAME)

        def before(event, args):
            touched = any(
                isinstance(arg, str | os.PathLike) and os.fspath(arg).startswith(path)
                for arg in args
            )
            if touched and event.startswith(("os.", "open")) and next(operations) in stops:
                pipe.send("stopped")
                pipe.recv()

        sys.addaudithook(before)
        pipe.send(_acquired(root))
        pipe.recv()
        lock.release(root)
        pipe.send("released")

    def wait(self):
        """Until it stops ("stopped"), or has acquired the lock or not (True or False)."""
        return self._pipe.recv()

    def resume(self):
        """After a stop; or release the lock."""
        self._pipe.send(None)
        return self.wait()

    def kill(self):
        self._process.kill()
        self._process.join()


@pytest.fixture
def contender():
    """Makes contenders, and ends them."""
    started = []

    def start(*args):
        started.append(Contender(*args))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def test_operations_are_all_of_a_takeover(tmp_path, left_behind, contender):
    root = shutil.copytree(left_behind, tmp_path / "root")
    one = contender(root, range(100))
    assert [one.wait(), *(one.resume() for _ in range(OPERATIONS))] == ["stopped"] * OPERATIONS + [
        True
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("first", range(OPERATIONS))
def test_however_takeovers_interleave_one_gets_it(
    tmp_path, left_behind, contender, first, released
):
    """One process stops before two of its operations on the lock; during each stop another one contends."""
    for second in range(first, OPERATIONS):
        root = shutil.copytree(left_behind, tmp_path / str(second))
        slow = contender(root, {first, second})
        assert slow.wait() == "stopped"
        quick = contender(root)
        holding = [quick.wait()]
        if holding[0] and released:
            quick.resume()
            holding = []
        state = slow.resume() if second > first else "stopped"
        holding.append(contender(root).wait())
        holding.append(slow.resume() if state == "stopped" else state)
        assert sorted(holding) == [False] * (len(holding) - 1) + [True], (
            f"stopped at {first} and {second}"
        )


@pytest.mark.parametrize("stop", range(OPERATIONS))
def test_killed_anywhere_it_leaves_a_lock_that_the_next_one_gets(
    tmp_path, left_behind, contender, stop
):
    root = shutil.copytree(left_behind, tmp_path / "root")
    killed = contender(root, {stop})
    assert killed.wait() == "stopped"
    killed.kill()
    assert contender(root).wait() is True


def test_a_lock_that_an_earlier_version_left_is_taken_over_by_one(tmp_path, contender):
    gone = replace(Process.current(), started=1)
    (tmp_path / lock.NAME).write_text(json.dumps(asdict(gone)))
    assert sorted(contender(tmp_path).wait() for _ in range(3)) == [False, False, True]


@pytest.mark.parametrize("rounds", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_one_of_many_gets_it(tmp_path, left_behind, rounds):
    """Eight processes start on one dead holder's lock at once, again and again."""
    barrier, got = CONTEXT.Barrier(CONTENDERS + 1), CONTEXT.Array("b", CONTENDERS)
    contenders = [
        CONTEXT.Process(target=_contend, args=(tmp_path, rounds, barrier, got, index), daemon=True)
        for index in range(CONTENDERS)
    ]
    for process in contenders:
        process.start()
    for number in range(rounds):
        root = shutil.copytree(left_behind, tmp_path / str(number))
        barrier.wait(60)
        barrier.wait(60)
        assert sum(got) == 1, f"round {number}"
        barrier.wait(60)
        assert [path.name for path in root.iterdir()] == [], "everybody cleans up"
    for process in contenders:
        process.join()


def _contend(folder, rounds, barrier, got, index):
    for number in range(rounds):
        barrier.wait(60)
        got[index] = _acquired(folder / str(number))
        barrier.wait(60)
        lock.release(folder / str(number))
        barrier.wait(60)
