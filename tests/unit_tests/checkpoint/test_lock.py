# SPDX-License-Identifier: Apache-2.0
"""A directory has one writer; that of a dead one is taken over."""

import json
import multiprocessing
import os
import shutil
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
    """Make ``process`` the holder, whoever holds the lock now; the file that says so."""
    shutil.rmtree(root / lock.NAME, ignore_errors=True)
    (root / lock.NAME).mkdir()
    record = root / lock.NAME / "token.json"
    record.write_text(json.dumps(asdict(process)))
    return record


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
    with pytest.raises(
        UserError, match=f"is being written by process {other.pid} on .*stop that run"
    ):
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


def test_a_release_that_a_restart_interrupts_leaves_the_folder_free(tmp_path, monkeypatch):
    lock.acquire(tmp_path)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(
            lock, "_remove_record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            lock.release(tmp_path)
    assert lock.holder(tmp_path) == Process.current()
    assert lock.acquire(tmp_path), "the process still lives, and the lock is its own"


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
    record = _write(tmp_path, replace(_dead(), host="elsewhere"))
    beat = threading.Timer(0.2, os.utime, [record])
    beat.start()
    with pytest.raises(UserError, match="on elsewhere"):
        lock.acquire(tmp_path)
    beat.join()


def test_a_holder_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    lock.acquire(tmp_path)
    (record,) = (tmp_path / lock.NAME).iterdir()
    os.utime(record, (1, 1))
    until = time.monotonic() + 5
    while record.stat().st_mtime == 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert record.stat().st_mtime > 1


def test_a_run_that_was_taken_over_writes_no_more(tmp_path):
    lock.acquire(tmp_path)
    lock.check(tmp_path)
    record = _write(tmp_path, replace(Process.current(), host="elsewhere"))
    with pytest.raises(UserError, match="on elsewhere"):
        lock.check(tmp_path)
    lock.release(tmp_path)
    assert record.exists(), "it is not ours to remove"


def test_a_folder_made_for_the_lock_alone_goes_with_it(tmp_path):
    lock.acquire(tmp_path / "run")
    lock.release(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "loop"])
def test_a_name_that_no_folder_can_have_is_refused(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"cannot be written: .*; choose a folder that can"):
        lock.acquire(tmp_path / name)


def test_what_no_run_made_there_is_refused_not_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    (tmp_path / lock.NAME).mkdir()
    (tmp_path / lock.NAME / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="by another process: stop that run"):
        lock.acquire(tmp_path)
    assert (tmp_path / lock.NAME / "notes.txt").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_file_that_cannot_be_read_is_watched_then_taken_over(tmp_path, monkeypatch, content):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    _write(tmp_path, Process.current()).write_text(content)
    assert lock.acquire(tmp_path)
