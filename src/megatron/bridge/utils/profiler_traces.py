# SPDX-License-Identifier: Apache-2.0
"""Merge the traces of all ranks into one for Perfetto.

A trace is JSON in Chrome's format, as PyTorch's profiler writes it: times are microseconds after
``baseTimeNanoseconds``, which count from 1970 by the clock of the machine. In the merged trace, each process of each
rank has its own number and name, arrows between events stay within their rank, and all times have one base.
"""

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from megatron.bridge.utils import strict_json
from megatron.bridge.utils.atomic import published_file, refuse_unwritable
from megatron.bridge.utils.errors import UserError, one_line

TRACES_DIR = "traces"
METADATA_KEY = "megatron_bridge"

Clock = Literal["wall", "barrier"]
# also the names of earlier versions, which TensorBoard's profiler did not list
_NAME = re.compile(r"rank_(\d+)(?:\.pt\.trace)?\.json(?:\.gz)?")
_ARROWS = frozenset("stf")  # phases of events that an id ties together: start, step, finish


def trace_name(rank: int) -> str:
    """Return the file name of a rank's trace, with the ending by which TensorBoard's plugin finds it."""
    return f"rank_{rank}.pt.trace.json.gz"


@dataclass(frozen=True)
class MergedTrace:
    ranks: list[int]  # ranks of the traces
    events: int  # number of events
    apart: float  # largest difference of the ranks' clocks at the barrier before the first step, in seconds


def find_traces(folder: Path) -> dict[int, Path]:
    """Find the traces by rank, in a run's folder, in its ``traces``, or in a subfolder of ``traces``."""
    folders = sorted(
        {path.parent for path in folder.rglob("rank_*.json*") if _NAME.fullmatch(path.name)}
    )
    if not folders:
        raise UserError(
            f"{folder} has no traces ({trace_name(0)}): train with profiling.use_pytorch_profiler=true"
        )
    if len(folders) > 1:
        raise UserError(
            f"{folder} has several sets of traces: give one of {', '.join(map(str, folders))}"
        )
    paths = sorted(folders[0].iterdir())
    return dict(
        sorted((int(name[1]), path) for path in paths if (name := _NAME.fullmatch(path.name)))
    )


def merge(traces: dict[int, Path], target: Path, clock: Clock = "wall") -> MergedTrace:
    """Write the traces of all ranks to ``target``, one rank in memory at a time.

    The target is compressed if its name ends in ``.gz``. ``clock`` ``wall`` trusts the machines' clocks; ``barrier``
    shifts each rank so that all leave the barrier before the first profiled step at once, for machines whose clocks
    differ.

    Raises:
        UserError: a trace is missing, damaged, or of another kind; nothing is written.
    """
    with refuse_unwritable(str(target), "choose another file"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with published_file(target) as aside, _open_output(aside) as file:
            return _TraceMerger(traces, file, clock).run()


def _open_output(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "wt", compresslevel=3))  # 6 takes three times as long
    return path.open("w")


def read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        content = strict_json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        return content | {name: content[name] for name in ("traceEvents", "baseTimeNanoseconds")}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__} {one_line(error, 120)}"
        raise UserError(
            f"{path} is not a complete trace of PyTorch's profiler ({reason}): profile again"
        ) from error


class _TraceMerger:
    """Process numbers and the time base for all ranks."""

    def __init__(self, traces: dict[int, Path], file: IO[str], clock: Clock) -> None:
        self._traces = traces
        self._file = file
        self._clock = clock
        self._base: int | None = None  # the first rank's, in nanoseconds
        self._met: list[int] = []  # when each rank left the barrier, in nanoseconds
        self._processes: dict[tuple[int, Any], int] = {}
        self._arrows: dict[tuple[int, Any], int] = {}
        self._named: set[int] = set()
        self._events = 0

    def run(self) -> MergedTrace:
        self._file.write('{"traceEvents": [\n')
        for rank, path in self._traces.items():
            self._add(rank, path, read(path))
        about = {
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base,
            METADATA_KEY: [*self._traces],
        }
        self._file.write(f"\n],\n{json.dumps(about)[1:-1]}}}\n")
        apart = max(self._met) - min(self._met) if self._met else 0
        return MergedTrace([*self._traces], self._events, apart / 1e9)

    def _add(self, rank: int, path: Path, trace: dict[str, Any]) -> None:
        about: dict[str, Any] = trace.get(METADATA_KEY) or {}
        self._check(rank, path, about)
        shift = self._shift(trace["baseTimeNanoseconds"], about.get("met_ns"), path)
        name = about.get("name", f"rank {rank}")
        for event in self._events_of(rank, name, trace["traceEvents"], shift):
            self._write(event)
        for (owner, process_id), process in self._processes.items():
            if owner == rank and process not in self._named:
                called = {"name": f"{name} {process_id or 'marks'}"}
                self._write(
                    {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": called}
                )

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write((",\n" if self._events else "") + json.dumps(event))
        self._events += 1

    def _check(self, rank: int, path: Path, about: dict[str, Any]) -> None:
        recorded_rank = about.get("rank", rank)
        if recorded_rank != rank:
            raise UserError(
                f"{path} is the trace of rank {recorded_rank}: rename it to {trace_name(recorded_rank)}"
            )
        missing = [
            str(profiled_rank)
            for profiled_rank in about.get("ranks", [])
            if profiled_rank not in self._traces
        ]
        if missing:
            raise UserError(
                f"{path.parent} has no trace of rank {', '.join(missing)}, which was profiled: copy it there"
            )

    def _shift(self, base: int, met: int | None, path: Path) -> float:
        """Record the base and barrier times (ns) of a rank; return the microseconds to add to its events."""
        if self._base is None:
            self._base = base
        if met is None and self._clock == "barrier":
            raise UserError(f"{path} has no time of the barrier: leave --clock barrier out")
        if met is not None:
            self._met.append(met)
        moved = self._met[0] - met if self._clock == "barrier" and met is not None else 0
        return (base - self._base + moved) / 1e3

    def _events_of(
        self, rank: int, name: str, events: Iterable[dict[str, Any]], shift: float
    ) -> Iterator[dict[str, Any]]:
        for event in events:
            moved = dict(event)
            if "pid" in moved:
                moved["pid"] = self._processes.setdefault(
                    (rank, moved["pid"]), len(self._processes) + 1
                )
            if "ts" in moved:
                moved["ts"] = moved["ts"] + shift
            if moved.get("ph") in _ARROWS:
                moved["id"] = self._arrows.setdefault((rank, moved["id"]), len(self._arrows) + 1)
            if moved.get("ph") == "M":
                self._describe(moved, name)
            yield moved

    def _describe(self, event: dict[str, Any], name: str) -> None:
        """Name a process by its rank, and sort the processes by rank."""
        if event["name"] == "process_name":
            self._named.add(event["pid"])
            # the process of a GPU is also named python, and has a label
            event["args"] = {"name": name}
        elif event["name"] == "process_sort_index":
            event["args"] = {"sort_index": event["pid"]}
