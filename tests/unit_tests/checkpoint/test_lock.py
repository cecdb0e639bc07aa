# SPDX-License-Identifier: Apache-2.0
"""A directory has one writer; that of a dead one is taken over."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from megatron.bridge.checkpoint import lock
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.processes import Process


@pytest.fixture(autouse=True)
def released(tmp_path):
    yield
    lock.release(tmp_path)


def _write(root, process):
    (root / lock.NAME).write_text(json.dumps(asdict(process)))


def _dead():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    found = replace(Process.current(), pid=process.pid, started=1)
    process.wait()
    return found


def _hold(root, ready, leave):
    lock.acquire(root)
    ready.set()
    leave.wait(30)


def test_the_second_of_two_processes_is_refused_by_name(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, leave))
    other.start()
    assert ready.wait(30)
    with pytest.raises(UserError, match=f"is being written by process {other.pid} on .*stop that run"):
        lock.acquire(tmp_path)
    other.kill()
    other.join()
    assert lock.acquire(tmp_path), "the lock of a killed process is taken over"
    assert lock.holder(tmp_path) == Process.current()


def test_taking_it_twice_is_one_lock(tmp_path):
    assert lock.acquire(tmp_path)
    assert not lock.acquire(tmp_path)
    with lock.held(tmp_path):
        pass
    assert lock.holder(tmp_path) is not None
    lock.release(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_number_that_another_process_got_since_is_not_the_holder(tmp_path):
    _write(tmp_path, replace(Process.current(), started=1))
    assert lock.acquire(tmp_path)


def test_a_lock_from_before_a_restart_or_of_another_container(tmp_path, monkeypatch):
    """The same host name, but the number may be anybody's: only time tells."""
    monkeypatch.setattr(lock, "PATIENCE", 0.3)
    _write(tmp_path, replace(Process.current(), boot="before"))
    assert lock.acquire(tmp_path)


def test_a_dead_process_on_another_machine_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.3)
    _write(tmp_path, replace(_dead(), host="elsewhere"))
    started = time.monotonic()
    assert lock.acquire(tmp_path)
    assert time.monotonic() - started >= 0.3


def test_a_living_process_on_another_machine_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 5.0)
    _write(tmp_path, replace(_dead(), host="elsewhere"))
    beat = threading.Timer(0.2, os.utime, [tmp_path / lock.NAME])
    beat.start()
    with pytest.raises(UserError, match="on elsewhere"):
        lock.acquire(tmp_path)
    beat.join()


def test_a_holder_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    lock.acquire(tmp_path)
    os.utime(tmp_path / lock.NAME, (1, 1))
    until = time.monotonic() + 5
    while (tmp_path / lock.NAME).stat().st_mtime == 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert (tmp_path / lock.NAME).stat().st_mtime > 1


def test_a_run_that_was_taken_over_writes_no_more(tmp_path):
    lock.acquire(tmp_path)
    lock.check(tmp_path)
    _write(tmp_path, replace(Process.current(), host="elsewhere"))
    with pytest.raises(UserError, match="on elsewhere"):
        lock.check(tmp_path)
    lock.release(tmp_path)
    assert lock.holder(tmp_path).host == "elsewhere", "it is not ours to remove"


def test_a_folder_made_for_the_lock_alone_goes_with_it(tmp_path):
    lock.acquire(tmp_path / "run")
    lock.release(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "loop"])
def test_a_name_that_no_folder_can_have_is_refused(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"cannot be written: .*; choose a folder that can"):
        lock.acquire(tmp_path / name)


def test_one_of_many_gets_it(tmp_path):
    _write(tmp_path, _dead())
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    start = context.Event()
    contenders = [context.Process(target=_contend, args=(tmp_path, start, results)) for _ in range(6)]
    for process in contenders:
        process.start()
    start.set()
    assert sorted(results.get(timeout=30) for _ in contenders) == [False] * 5 + [True]
    for process in contenders:
        process.kill()
        process.join()


def _contend(root, start, results):
    start.wait(30)
    try:
        results.put(lock.acquire(root))
    except UserError:
        results.put(False)
    time.sleep(30)
