# SPDX-License-Identifier: Apache-2.0
"""Ports of this machine on which a server can listen."""

import random
import socket

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
