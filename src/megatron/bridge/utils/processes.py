# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: whether one lives, how to die with one, and a port on which they can meet."""

import ctypes
import os
import random
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Process:
    """One process, distinct from others that get its number later."""

    host: str  # name of the machine
    boot: str  # names the time since the machine started, and the container, which has its own numbers
    pid: int  # its number there
    started: int  # clock ticks from the start of the machine to that of the process

    @classmethod
    def current(cls) -> "Process":
        return cls(socket.gethostname(), _boot(), os.getpid(), start_time(os.getpid()) or 0)

    @property
    def is_here(self) -> bool:
        """Whether its number means something here, so that ``is_alive`` can tell."""
        return (self.host, self.boot) == (socket.gethostname(), _boot())

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; one that was stopped does."""
        return start_time(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks after the machine did; None if it is gone, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in brackets may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + namespace
    except OSError:
        return ""


def die_with_parent(signum: signal.Signals) -> None:
    """Have ``signum`` sent to this process when the one that started it ends, however it ends. Linux only."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent:  # it ended just before
        os.kill(os.getpid(), signum)


# below those that Linux, macOS and Windows give outgoing connections, which could take a port before its server does
_FIRST, _LAST = 20_000, 32_000


def free_port(count: int = 1) -> int:
    """A port of 127.0.0.1 on which nothing listens, as are the ``count - 1`` after it."""
    choose = random.SystemRandom()  # leaves the seeds of this process alone
    while True:
        first = choose.randrange(_FIRST, _LAST)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
