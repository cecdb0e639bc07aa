# SPDX-License-Identifier: Apache-2.0
"""Limits for code that somebody else wrote, such as a chat template."""

import os
import resource
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

CPU_SECONDS = 10.0
MEMORY = 4 << 30


@contextmanager
def limited(cpu_seconds: float = CPU_SECONDS, memory: int = MEMORY) -> Generator[None]:
    """End the block when it takes more than this CPU time or memory.

    Limits apply in the main thread, because only it receives signals; elsewhere the block runs without limits.

    ``memory`` is in bytes, in addition to the address space of the process at the start.

    Raises:
        TimeoutError: the block takes longer.
        MemoryError: the block needs more memory.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> NoReturn:
        raise TimeoutError(f"it takes more than {cpu_seconds:.0f} s")

    before, (soft, hard) = signal.signal(signal.SIGVTALRM, interrupt), resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + memory
    resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == resource.RLIM_INFINITY else min(soft, wanted), hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
