# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: check whether one is alive, end with a parent process, and find a free port."""

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
    """A process, distinguished from later processes with the same pid."""

    host: str  # name of the machine
    boot: str  # identifies the boot of the machine and the container, which has its own numbers
    pid: int  # process id on the host
    started: int  # clock ticks between the start of the machine and of the process

    @classmethod
    def current(cls) -> "Process":
        return cls(socket.gethostname(), _boot_id(), os.getpid(), start_time(os.getpid()) or 0)

    @property
    def is_here(self) -> bool:
        """Return whether the pid is valid on this machine, so that ``is_alive`` can check it."""
        return (self.host, self.boot) == (socket.gethostname(), _boot_id())

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs or is stopped."""
        return start_time(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in brackets may contain any characters
    return None if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str:
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + namespace
    except OSError:
        return ""


def die_with_parent(signum: signal.Signals) -> None:
    """Make Linux send ``signum`` to this process when its parent process ends for any reason."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signum)


# below the ports for outgoing connections on Linux, macOS and Windows, which could take a port before its server
_FIRST, _LAST = 20_000, 32_000


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` consecutive ports of 127.0.0.1 on which nothing listens."""
    choose = random.SystemRandom()  # does not change the random state of this process
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
