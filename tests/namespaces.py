# SPDX-License-Identifier: Apache-2.0
"""Two nodes on this machine: network namespaces that a virtual cable joins."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress


def missing() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and ip"
    return None


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class TwoNamespaces:
    """Namespaces 0 and 1, each with an address in a network of their own.

    Attributes:
        cables: The network interface of each.
    """

    def __init__(self, network: str = "10.77.0") -> None:
        self.names = [f"node{os.getpid()}_{number}" for number in (1, 2)]
        self.cables = [f"mb{os.getpid()}{side}" for side in "ab"]
        self.addresses = [f"{network}.{number}" for number in (1, 2)]

    def __enter__(self):
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ends = [
            ["name", cable, "netns", name]
            for cable, name in zip(self.cables, self.names, strict=True)
        ]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
        return self

    def __exit__(self, *_):
        for number, name in enumerate(self.names):
            self.kill_all(number)
            ip("netns", "del", name)

    def kill_all(self, number: int) -> None:
        for pid in self.processes(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def inside(self, number: int) -> list[str]:
        """What stands before a command that runs in a namespace."""
        return ["nsenter", f"--net=/run/netns/{self.names[number]}"]

    def processes(self, number: int) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.names[number]).split()]

    def plug(self, number: int, state: str) -> None:
        ip("-n", self.names[number], "link", "set", self.cables[number], state)
