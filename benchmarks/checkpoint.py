# SPDX-License-Identifier: Apache-2.0
"""Saving and loading against the same bytes written and read raw; what the background and the hashes cost.

``python benchmarks/checkpoint.py --parameters 200`` (millions, with fp32 master weights and Adam's two moments).
One process, one file; the folder's disk decides most of it. A save in the background is charged with what it makes
the next update of all values slower, too: a copy that is put off is not saved.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash
from measure import fault_in, interleaved, median, table

import megatron.bridge  # noqa: F401 - makes megatron.core usable without a GPU
from megatron.bridge.checkpoint import distributed, manifest, saving, verification
from megatron.bridge.checkpoint.background import Background
from megatron.bridge.utils import dist

COLUMNS = 4096


def tensors(millions: float) -> dict[str, torch.Tensor]:
    """A model's state: bf16 weights, and three fp32 tensors for each."""
    rows = int(millions * 1e6) // (COLUMNS * 16)
    return {
        f"{kind}.{index}": torch.randn(rows, COLUMNS).to(dtype)
        for index in range(16)
        for kind, dtype in (("weight", torch.bfloat16), *((name, torch.float32) for name in ("master", "m", "v")))
    }


def sharded(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state as Megatron-Core describes it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {name: ShardedTensor.from_rank_offsets(name, value) for name, value in state.items()}


def write_raw(state: dict[str, torch.Tensor], path: Path) -> None:
    """All bytes into one file, and to the disk."""
    with path.open("wb", buffering=0) as stream:
        for value in state.values():
            left = memoryview(value.view(torch.uint8).numpy()).cast("B")
            while left:
                left = left[stream.write(left) :]
        os.fsync(stream.fileno())


def read_raw(path: Path, size: int) -> None:
    """All bytes of a file into fresh memory."""
    buffer = bytearray(size)
    with path.open("rb", buffering=0) as stream, memoryview(buffer) as view:
        done = 0
        while count := stream.readinto(view[done:]):
            done += count


def hash_all(state: dict[str, torch.Tensor]) -> None:
    """Hash as a save does, a piece after the other."""
    digest = xxhash.xxh3_128()
    for value in state.values():
        view = memoryview(value.view(torch.uint8).numpy()).cast("B")
        for start in range(0, len(view), manifest.CHUNK):
            digest.update(view[start : start + manifest.CHUNK])


class NoHash:
    """Takes no time."""

    def update(self, data: object) -> None:
        """Nothing."""

    def hexdigest(self) -> str:
        """As long as a hash."""
        return "0" * 32


def without_hashes(state: dict[str, torch.Tensor], directory: Path) -> None:
    """A save that costs what one would without them."""
    with mock.patch.object(manifest.xxhash, "xxh3_128", NoHash):
        saving.save(sharded(state), directory, overwrite=True)


def update(state: dict[str, torch.Tensor]) -> float:
    """Change every value, as an optimizer does; the seconds it takes."""
    start = time.perf_counter()
    for value in state.values():
        value.neg_()
    return time.perf_counter() - start


class InBackground:
    """Saves in the background, and what they cost the caller.

    Attributes:
        stopped: Seconds until the caller could go on, for each save.
        slowed: Seconds by which the next update took longer than one before the save.
    """

    def __init__(self, state: dict[str, torch.Tensor], directory: Path) -> None:
        self.stopped: list[float] = []
        self.slowed: list[float] = []
        self._state, self._directory = state, directory
        self._background = Background()
        self._background.reserve(saving.memory_for(sharded(state)))

    def __call__(self) -> None:
        """Save once, with an update before it and one right after it."""
        usual = min(update(self._state), update(self._state))
        start = time.perf_counter()
        saving.save(sharded(self._state), self._directory, overwrite=True, background=self._background)
        self.stopped.append(time.perf_counter() - start)
        self.slowed.append(update(self._state) - usual)
        self._background.poll(wait=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=200, help="millions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    dist.initialize("gloo")
    torch.set_num_threads(1)
    state = tensors(args.parameters)
    size = sum(value.nbytes for value in state.values())
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        print(report(state, size, folder, args.rounds))
    finally:
        shutil.rmtree(folder)


def report(state: dict[str, torch.Tensor], size: int, folder: Path, rounds: int) -> str:
    """The table."""
    saved, background = folder / "iter_0000001", InBackground(state, folder / "iter_0000002")
    cases: dict[str, Callable[[], object]] = {
        "write raw": lambda: write_raw(state, folder / "raw"),
        "save": lambda: saving.save(sharded(state), saved, overwrite=True),
        "save without hashes": lambda: without_hashes(state, folder / "iter_0000003"),
        "save in the background, to the end": background,
        "hash": lambda: hash_all(state),
        "read raw": lambda: read_raw(folder / "raw", size),
        "load": lambda: distributed.load(sharded(state), saved),
        "verify": lambda: verification.verify(saved, "full"),
        "verify, fast": lambda: verification.verify(saved, "fast"),
    }
    times = {name: median(found) for name, found in interleaved(cases, rounds, lambda: fault_in(2 * size)).items()}
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
        f"hashes make a save {100 * (times['save'].wall / times['save without hashes'].wall - 1):.1f} % longer; "
        f"taken alone, they are {100 * times['hash'].cpu / times['save'].wall:.1f} % of it",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
