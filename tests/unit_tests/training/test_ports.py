# SPDX-License-Identifier: Apache-2.0
"""Ports for servers, which no outgoing connection takes."""

import random
import socket
from pathlib import Path

import pytest

from megatron.bridge.utils import processes


def test_ports_lie_below_those_of_connections():
    range_of_linux = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not range_of_linux.exists():
        pytest.skip("no Linux")
    assert processes.free_port() < int(range_of_linux.read_text().split()[0])


def test_ports_in_a_row_are_free(monkeypatch):
    with socket.socket() as taken:
        first = processes.free_port(5)
        taken.bind(("127.0.0.1", first + 2))
        drawn = iter([first, first + 1, first + 2, first + 3])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert processes.free_port(2) == first
        assert processes.free_port(2) == first + 3


def test_seeds_are_left_alone():
    state = random.getstate()
    processes.free_port()
    assert random.getstate() == state
