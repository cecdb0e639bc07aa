# SPDX-License-Identifier: Apache-2.0
"""One run at a time writes to a directory: the second is refused, and told who is there.

``<root>/run.lock`` names the process that holds it (the first rank of a run) and is touched while that lives.

* A holder on the same machine is looked up: alive, it is named and the second run refused; gone, its lock is
  taken.
* A holder on another machine, or in another container, cannot be looked up. Its lock is watched for ``PATIENCE``
  seconds, three of its beats: touched in that time, the second run is refused; untouched, the holder is taken for
  dead, which is said.

A holder that was stopped for so long that another run took over is refused at its next save (``check``).
"""

import atexit
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.processes import Process

NAME = "run.lock"
BEAT = 10.0
PATIENCE = 3 * BEAT

_held: dict[Path, "_Lock"] = {}


def acquire(root: str | Path) -> bool:
    """Take the lock of ``root`` for this process, until ``release`` or its end.

    Returns:
        Whether it was taken; False if this process holds it already.

    Raises:
        UserError: another process writes there, or the directory cannot be written.
    """
    try:
        key = _key(root)
        if key in _held and _held[key].owner == Process.current():
            return False
        existed = key.is_dir()
        key.mkdir(parents=True, exist_ok=True)
        _take(key / NAME)
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # of names that no folder can have, and of loops of links
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{root} cannot be written: {reason}; choose a folder that can") from error
    _held[key] = _Lock(key / NAME, existed)
    return True


def check(root: str | Path) -> None:
    """Refuse to go on where another process took the lock over from this one.

    Raises:
        UserError: naming it.
    """
    lock = _held.get(_key(root))
    if lock is not None and (other := holder(root)) != lock.owner:
        raise _refusal(_key(root) / NAME, other)


def release(root: str | Path) -> None:
    """Give the lock of ``root`` back, if this process holds it; a directory made for it alone goes, too."""
    lock = _held.pop(_key(root), None)
    if lock is not None:
        lock.release()


@contextmanager
def held(root: str | Path) -> Iterator[None]:
    """Hold the lock inside; a process that had it before keeps it."""
    taken = acquire(root)
    try:
        yield
    finally:
        if taken:
            release(root)


def holder(root: str | Path) -> Process | None:
    """Who holds the lock of ``root`` by what its file says, dead or alive."""
    return _read(_key(root) / NAME)


def _key(root: str | Path) -> Path:
    return Path(root).resolve()


def _take(path: Path) -> None:
    while not _create(path):
        other = _read(path)
        if other is not None and other.is_here:
            if other.is_alive:
                raise _refusal(path, other)
        elif _beats(path):
            raise _refusal(path, other)
        gone = _set_aside(path, other)
        if gone:
            console().print(f"took over {path} of {other or 'an unknown process'}, which is gone", markup=False)


def _refusal(path: Path, other: Process | None) -> UserError:
    who = other or "another process"
    return UserError(
        f"{path.parent} is being written by {who}: stop that run, or give this one another checkpoint.save"
    )


def _create(path: Path) -> bool:
    """Whether ``path`` is now ours: of several processes, one can create it."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as stream:
        json.dump(asdict(Process.current()), stream)
    return True


def _read(path: Path) -> Process | None:
    try:
        return Process(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _beats(path: Path) -> bool:
    """Whether a holder on another machine shows that it lives; compares no clocks of two machines."""
    console().print(f"{path} is of a run elsewhere: waiting up to {PATIENCE:.0f} s for a sign of it", markup=False)
    before, until = _touched(path), time.monotonic() + PATIENCE
    while time.monotonic() < until:
        time.sleep(min(1.0, PATIENCE / 10))
        now = _touched(path)
        if now != before:
            return now is not None
    return False


def _touched(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _set_aside(path: Path, other: Process | None) -> bool:
    """Remove a dead process's lock; False if somebody else was quicker, whose lock must stay."""
    aside = path.with_name(f".{NAME}.{os.getpid()}.stale")
    try:
        path.replace(aside)
    except FileNotFoundError:
        return False
    mine = _read(aside) == other
    if not mine and not path.exists():
        aside.replace(path)
        return False
    aside.unlink()
    return True


class _Lock:
    """A lock that is held: touches its file in a thread."""

    def __init__(self, path: Path, root_existed: bool) -> None:
        self.owner = Process.current()
        self._path = path
        self._root_existed = root_existed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run.lock", daemon=True)
        self._thread.start()
        atexit.register(self.release)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            if _read(self._path) == self.owner:
                with suppress(OSError):  # a file system that is away for a moment
                    os.utime(self._path)

    def release(self) -> None:
        """Stop and remove the file, unless it was taken over or this is a forked copy."""
        atexit.unregister(self.release)
        self._stop.set()
        if Process.current() == self.owner and _read(self._path) == self.owner:
            self._path.unlink(missing_ok=True)
            root = self._path.parent
            if not self._root_existed and not any(root.iterdir()):
                root.rmdir()
