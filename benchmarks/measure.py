# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks measure: interleaved rounds, wall and CPU seconds, anonymous memory.

Virtual machines take back freed pages, so that touching memory for the first time can cost seconds a gigabyte;
``fault_in`` pays that before the clock starts, for every candidate alike.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, and the anonymous memory that it took above the start, in bytes."""

    wall: float
    cpu: float
    peak_anonymous: int = 0


def wait() -> None:
    """Until the device has done what it was asked."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def fault_in(size: int) -> None:
    """Touch ``size`` bytes of fresh memory and free them."""
    np.empty(size, dtype=np.uint8)[::4096] = 1


def anonymous_memory() -> int:
    """Resident anonymous memory of this process in bytes: mapped file pages do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon line")


@contextmanager
def peak_memory(interval: float = 0.005) -> Iterator[list[int]]:
    """Sample anonymous memory in a thread; the list's only item is the peak above the start."""
    start, peak, stop = anonymous_memory(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(interval):
            peak[0] = max(peak[0], anonymous_memory() - start)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        peak[0] = max(peak[0], anonymous_memory() - start)
        stop.set()
        thread.join()


def timed(function: Callable[[], object]) -> Timing:
    """Run ``function`` once; what it returns is freed outside the clock."""
    with peak_memory() as peak:
        wall, cpu = time.perf_counter(), time.process_time()
        result = function()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    del result
    return Timing(wall, cpu, peak[0])


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    before_each: Callable[[], None] = lambda: None,
) -> dict[str, list[Timing]]:
    """Time every case once a round, so that a noisy moment hits all of them.

    The first round is in the given order, the others in any: what a case leaves behind (cached files, freed pages
    that the host takes back) must not always be found by the same one: it made one of two equal saves 20 % slower.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in cases}
    names, draw = list(cases), random.Random(0)
    for _ in range(rounds):
        for name in names:
            before_each()
            timings[name].append(timed(cases[name]))
        draw.shuffle(names)
    return timings


def median(timings: list[Timing]) -> Timing:
    """Medians of wall and CPU seconds, and the largest memory peak."""
    return Timing(
        statistics.median(timing.wall for timing in timings),
        statistics.median(timing.cpu for timing in timings),
        max(timing.peak_anonymous for timing in timings),
    )


def table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
