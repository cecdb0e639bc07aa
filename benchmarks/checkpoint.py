# SPDX-License-Identifier: Apache-2.0
"""Saving and loading against the same bytes written and read raw; what the background and the hashes cost.

``python benchmarks/checkpoint.py --parameters 200`` (millions, with fp32 master weights and Adam's two moments).
One file a process; the folder's disk decides most of it. A save in the background is charged with what it makes
the next update of all values slower, too: a copy that is put off is not saved. What hashes cost is the median over
``--pairs`` of a save with them against one right beside it without, now the one first and now the other; the same
for two saves without them, and the intervals, tell how far to trust it. A load fills memory that is there, so its
floor is such a read, too. ``torchrun --nproc-per-node 2`` shares the state out, for the pairs alone.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash
from measure import Timing, fault_in, interleaved, median, table, timed

import megatron.bridge  # noqa: F401 - makes megatron.core usable without a GPU
from megatron.bridge.checkpoint import loading, manifest, saving, verification
from megatron.bridge.checkpoint.async_writer import AsyncSaver
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.utils import distributed

COLUMNS = 4096


def tensors(millions: float) -> dict[str, torch.Tensor]:
    """A model's state: bf16 weights, and three fp32 tensors for each."""
    rows = int(millions * 1e6) // (COLUMNS * 16)
    return {
        f"{kind}.{index}": torch.randn(rows, COLUMNS).to(dtype)
        for index in range(16)
        for kind, dtype in (
            ("weight", torch.bfloat16),
            *((name, torch.float32) for name in ("master", "m", "v")),
        )
    }


def sharded(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state as Megatron-Core describes it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    part = (0, distributed.rank(), distributed.world_size())
    return {
        name: ShardedTensor.from_rank_offsets(name, value, part) for name, value in state.items()
    }


def in_memory(state: dict[str, torch.Tensor]) -> list[memoryview]:
    """The bytes of all tensors, where they are."""
    return [memoryview(value.view(torch.uint8).numpy()).cast("B") for value in state.values()]


def write_raw(state: dict[str, torch.Tensor], path: Path) -> None:
    """All bytes into one file, and to the disk."""
    with path.open("wb", buffering=0) as stream:
        for part in in_memory(state):
            done = 0
            while done < len(part):
                done += stream.write(part[done:])
        os.fsync(stream.fileno())


def read_raw(path: Path, memory: Iterable[memoryview]) -> None:
    """All bytes of a file, which fill ``memory``."""
    with path.open("rb", buffering=0) as stream:
        for part in memory:
            done = 0
            while done < len(part):
                done += stream.readinto(part[done:])


def hash_all(state: dict[str, torch.Tensor]) -> None:
    """Hash as a save does, a piece after the other."""
    digest = xxhash.xxh3_128()
    for view in in_memory(state):
        for start in range(0, len(view), manifest.CHUNK):
            digest.update(view[start : start + manifest.CHUNK])


class NoHash:
    """Takes no time."""

    def update(self, data: object) -> None:
        """Nothing."""

    def hexdigest(self) -> str:
        """As long as a hash."""
        return "0" * 32


def with_hashes(state: dict[str, torch.Tensor], directory: Path) -> None:
    """A save as it is."""
    saving.save(sharded(state), directory, overwrite=True)


def without_hashes(state: dict[str, torch.Tensor], directory: Path) -> None:
    """A save that costs what one would without them."""
    with mock.patch.object(manifest.xxhash, "xxh3_128", NoHash):
        saving.save(sharded(state), directory, overwrite=True)


def pairs(state: dict[str, torch.Tensor], folder: Path, count: int) -> str:
    """What hashes cost; the same is asked of two saves that differ in nothing."""
    size = sum(value.nbytes for value in state.values())
    ways: dict[str, Callable[[Any, Path], None]] = {
        "with": with_hashes,
        "without": without_hashes,
        "again": without_hashes,
    }
    names, draw = list(ways), random.Random(0)
    found: dict[str, list[Timing]] = {name: [] for name in ways}
    for _ in range(count):
        for name in names:
            fault_in(2 * size)
            distributed.barrier()
            found[name].append(timed(lambda: ways[name](state, folder / "iter_0000004")))  # noqa: B023
        draw.shuffle(names)
    return "\n".join(
        f"a save {name} hashes takes {_ratio(found[one], found['without'], 'wall')} of the time and "
        f"{_ratio(found[one], found['without'], 'cpu')} of the CPU time of one without"
        for one, name in (("with", "with"), ("again", "without"))
    )


def _ratio(some: list[Timing], others: list[Timing], kind: str) -> str:
    """Median over pairs of the same round, and where it would lie in 95 of 100 repetitions (bootstrap)."""
    ratios = [getattr(a, kind) / getattr(b, kind) for a, b in zip(some, others, strict=True)]
    draw = random.Random(0)
    again = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.3f} ({again[50]:.3f} to {again[-51]:.3f})"


def update(state: dict[str, torch.Tensor]) -> float:
    """Change every value, as an optimizer does; the seconds it takes."""
    start = time.perf_counter()
    for value in state.values():
        value.neg_()
    return time.perf_counter() - start


class InBackground:
    """Saves in the background, and what they cost the caller.

    Attributes:
        stopped: Seconds until each save returned to its caller.
        slowed: Seconds by which the next update took longer than one before the save.
    """

    def __init__(self, state: dict[str, torch.Tensor], directory: Path) -> None:
        self.stopped: list[float] = []
        self.slowed: list[float] = []
        self._state, self._directory = state, directory
        self._background = AsyncSaver()
        self._background.reserve(saving.host_buffer_size(sharded(state)))

    def __call__(self) -> None:
        """Save once, with an update before it and one right after it."""
        usual = min(update(self._state), update(self._state))
        start = time.perf_counter()
        saving.save(
            sharded(self._state), self._directory, overwrite=True, background=self._background
        )
        self.stopped.append(time.perf_counter() - start)
        self.slowed.append(update(self._state) - usual)
        self._background.poll(wait=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=200, help="millions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=9, help="saves with and without hashes")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    distributed.initialize("gloo")
    torch.set_num_threads(1)
    state = tensors(args.parameters / distributed.world_size())
    folder = on_first_rank(lambda: Path(tempfile.mkdtemp(dir=args.folder)))
    try:
        lines = [] if distributed.world_size() > 1 else [report(state, folder, args.rounds)]
        lines.append(pairs(state, folder, args.pairs))
        if distributed.rank() == 0:
            print("\n".join(lines))
    finally:
        distributed.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def report(state: dict[str, torch.Tensor], folder: Path, rounds: int) -> str:
    """The table."""
    size = sum(value.nbytes for value in state.values())
    saved, background = folder / "iter_0000001", InBackground(state, folder / "iter_0000002")
    cases: dict[str, Callable[[], object]] = {
        "write raw": lambda: write_raw(state, folder / "raw"),
        "save": lambda: with_hashes(state, saved),
        "save in the background, to the end": background,
        "hash": lambda: hash_all(state),
        "read raw": lambda: read_raw(folder / "raw", in_memory(state)),
        "read raw into fresh memory": lambda: read_raw(
            folder / "raw", [memoryview(bytearray(size))]
        ),
        "load": lambda: loading.load(sharded(state), saved),
        "verify": lambda: verification.verify(saved, "full"),
        "verify, fast": lambda: verification.verify(saved, "fast"),
    }
    times = {
        name: median(found)
        for name, found in interleaved(cases, rounds, lambda: fault_in(2 * size)).items()
    }
    floors = {"save": "write raw", "load": "read raw", "verify": "read raw"}
    rows = [
        [
            name,
            f"{found.wall:.2f}",
            f"{found.cpu:.2f}",
            f"{size / 1e9 / found.wall:.2f}",
            f"{found.wall / times[floors[name]].wall:.2f}" if name in floors else "",
        ]
        for name, found in times.items()
    ]
    stop, slow = (statistics.median(found) for found in (background.stopped, background.slowed))
    lines = [
        table(["", "wall s", "CPU s", "GB/s", "to the floor"], rows),
        f"{size / 1e9:.2f} GB; a save in the background stops the caller for {stop:.3f} s, "
        f"{stop / size * 1e9:.3f} s/GB, {100 * stop / times['save'].wall:.1f} % of a save, "
        f"and the next update takes {slow / size * 1e9:.3f} s/GB longer;",
        f"the hashes alone take {100 * times['hash'].cpu / times['save'].wall:.1f} % of the time of a save",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
