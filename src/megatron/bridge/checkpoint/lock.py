# SPDX-License-Identifier: Apache-2.0
"""A lock, so that one run at a time writes to a directory; a second run is refused by naming the first.

``<root>/run.lock/`` is a directory with one file, named by a token that is never used again. The file says which
process holds the lock (the first rank of a run), and the holder touches it while it lives.

* If the holder is on the same machine, its process is looked up. If it is alive, the second run is refused; if it
  is gone, its lock is taken over.
* A holder on another machine, or in another container, cannot be looked up. Its file is watched for ``PATIENCE``
  seconds, three of its heartbeats. If it is touched in that time, the second run is refused; if not, the holder is
  assumed dead.

A holder that was suspended for so long that another run took over is refused at its next save (``check``).

It takes two steps, which are atomic on network file systems too, with or without ``flock``:

* To claim the lock, a process renames a directory that has its own file inside to ``run.lock``. Of several
  processes one succeeds, because a directory cannot replace another one that has a file in it.
* To take over a dead holder's lock, a process deletes the holder's file by its token. This can never delete the
  lock of another process, no matter how long ago the file was read. Whoever claims next gets the lock.

On object storage, ``bucket`` implements the same.

A process killed between the two leaves an empty ``run.lock``, which is free.
"""

import atexit
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

from megatron.bridge.checkpoint import bucket
from megatron.bridge.utils import storage
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.processes import Process
from megatron.bridge.utils.storage_paths import url_of

NAME = bucket.LOCK
BEAT = 10.0
PATIENCE = 3 * BEAT

_RECORD = ".json"  # a network file system may leave additional files next to a record

_held: dict[Path, "_Lock"] = {}


def acquire(root: str | Path) -> bool:
    """Acquire the lock of ``root`` until ``release`` or the end of the process; False if another process holds it."""
    try:
        key = storage.local(root).resolve()
        if key in _held and _held[key].owner == Process.current():
            return False
        existed = key.is_dir()
        record = _take_lock(key)
    except UserError:
        raise
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # names that no folder can have, and loops of links
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{root} cannot be written: {reason}; choose a folder that can") from error
    _held[key] = _Lock(record, existed)
    return True


def check(root: str | Path) -> None:
    """Refuse to continue if another process has taken over the lock."""
    key = storage.local(root).resolve()
    if key in _held and not _record_exists(_held[key].record):
        raise _make_refusal(key, holder(root))


def release(root: str | Path) -> None:
    """Release the lock of ``root`` if this process holds it; removes a directory that was made only for the lock."""
    lock = _held.pop(storage.local(root).resolve(), None)
    if lock is not None:
        lock.release()


@contextmanager
def held(root: str | Path) -> Iterator[None]:
    """Hold the lock inside the context; a process that already holds it keeps it."""
    taken = acquire(root)
    try:
        yield
    finally:
        if taken:
            release(root)


def holder(root: str | Path) -> Process | None:
    """The process that holds the lock of ``root`` according to its file, dead or alive."""
    record = _find_record(storage.local(root).resolve())
    return None if record is None else _read_holder(record)


def _take_lock(root: Path) -> Path:
    """Claim the lock of ``root``; returns the file that names its holder."""
    until = time.monotonic() + PATIENCE
    while (claimed := _claim_lock(root)) is None:
        record = _find_record(root)
        if record is not None:
            _remove_if_dead(record, root)
        elif time.monotonic() > until:  # something else lies there
            raise _make_refusal(root, None)
        else:
            time.sleep(0.01)
    return claimed


def _claim_lock(root: Path) -> Path | None:
    """Publish a file that names this process as the holder, atomically; None if another process has the lock."""
    token = uuid4().hex
    if url_of(root) is not None:
        return bucket.claim(
            root / NAME / f"{token}{_RECORD}", json.dumps(asdict(Process.current()))
        )
    aside = root / f".{NAME}.{token}"
    name = f"{token}{_RECORD}"
    aside.mkdir(parents=True)
    try:
        (aside / name).write_text(json.dumps(asdict(Process.current())))
        return root / NAME / name if _rename_if_free(aside, root / NAME) else None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rename_if_free(aside: Path, path: Path) -> bool:
    try:
        aside.rename(path)
    except OSError as error:
        if error.errno in {
            errno.EEXIST,
            errno.ENOTEMPTY,
            errno.ENOTDIR,
        }:  # a file is in it, or it is one
            return False
        raise
    return True


def _find_record(root: Path) -> Path | None:
    """The file that says who holds the lock of ``root``."""
    path = root / NAME
    if url_of(root) is not None:
        return next((path / name for name in storage.listing(path)), None)
    try:
        return next((entry for entry in path.iterdir() if entry.suffix == _RECORD), None)
    except FileNotFoundError:
        return None
    except NotADirectoryError:  # earlier versions wrote one file
        return path


def _read_holder(record: Path) -> Process | None:
    try:
        text = record.read_text() if url_of(record) is None else storage.read(record) or ""
        return Process(**json.loads(text))
    except (OSError, ValueError, TypeError):
        return None


def _remove_if_dead(record: Path, root: Path) -> None:
    lock_holder = _read_holder(record)
    if (
        lock_holder == Process.current()
    ):  # a restart within the process interrupted a claim or a release
        _remove_record(record, root)
        return
    if _is_alive(lock_holder, record):
        raise _make_refusal(root, lock_holder)
    if _remove_record(record, root):
        who = lock_holder or "an unknown process"
        console().print(f"removed the lock of {who}, which is gone, from {root}", markup=False)


def _is_alive(lock_holder: Process | None, record: Path) -> bool:
    if lock_holder is not None and lock_holder.is_here:
        return lock_holder.is_alive
    return _record_exists(record) and _has_heartbeat(record)


def _record_exists(record: Path) -> bool:
    return record.exists() if url_of(record) is None else storage.read(record) is not None


def _remove_record(record: Path, root: Path) -> bool:
    if url_of(record) is not None:
        storage.delete(record)
        return True
    try:
        record.unlink()
    except (FileNotFoundError, IsADirectoryError):  # the latter: one file has become a directory
        return False
    with suppress(OSError):  # the next holder may be in it already
        (root / NAME).rmdir()
    return True


def _make_refusal(root: Path, lock_holder: Process | None) -> UserError:
    who = lock_holder or "another process"
    return UserError(
        f"{root} is being written by {who}: stop that run, or give this one another checkpoint.save"
    )


def _has_heartbeat(record: Path) -> bool:
    """Whether a holder on another machine still touches its file; does not compare clocks of two machines."""
    console().print(
        f"{record.parent} is held by a run elsewhere: waiting up to {PATIENCE:.0f} s for a sign of life",
        markup=False,
    )
    before = _last_touch(record)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        time.sleep(min(1.0, PATIENCE / 10))
        now = _last_touch(record)
        if now != before:
            return now is not None
    return False


def _last_touch(record: Path) -> int | str | None:
    if url_of(record) is not None:
        return next(
            (
                entry.tag
                for name, entry in storage.listing(record.parent).items()
                if name == record.name
            ),
            None,
        )
    try:
        return record.stat().st_mtime_ns
    except FileNotFoundError:
        return None


class _Lock:
    """A lock that this process holds; a thread touches its file."""

    def __init__(self, record: Path, root_existed: bool) -> None:
        self.owner = Process.current()
        self.record = record
        self._root_existed = root_existed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=NAME, daemon=True)
        self._thread.start()
        atexit.register(self.release)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            with suppress(
                OSError, storage.StorageError
            ):  # it was taken over, or storage is away for a moment
                if url_of(self.record) is None:
                    os.utime(self.record)
                elif (text := storage.read(self.record)) is not None:
                    storage.write(self.record, text)

    def release(self) -> None:
        """Stop and remove the file, unless this is a forked copy."""
        atexit.unregister(self.release)
        self._stop.set()
        if Process.current() == self.owner:
            root = self.record.parent.parent
            with suppress(
                storage.StorageError
            ):  # another run waits until it takes this one for dead
                _remove_record(self.record, root)
            if not self._root_existed:
                with suppress(OSError):  # something is in it
                    root.rmdir()
