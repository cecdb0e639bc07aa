# SPDX-License-Identifier: Apache-2.0
"""Compute how much more memory a run needed than predicted, from its error or from a memory snapshot."""

import re
from pathlib import Path

from megatron.bridge.autotune.search.search import Search
from megatron.bridge.utils import unpickling
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = rf"(\d+(?:\.\d+)?) ({'|'.join(_UNITS)})"
_TRIED, _ALLOCATED = re.compile(f"Tried to allocate {_SIZE}"), re.compile(f"{_SIZE} is allocated by PyTorch")


def unpredicted(search: Search, path: Path) -> int:
    """Return at least how many bytes the config's layout needs beyond its prediction; 0 if it needs less."""
    needed = _peak(path) if path.suffix == ".pickle" else _of_error(read_text(path, f"--fix-oom {path}"), path)
    price = None if search.problems(search.current) else search.price(search.current)
    reserve = search.pricer.reserve(search.current)
    return 0 if price is None else max(0, reserve.around(needed) - price.fullest)


def _of_error(text: str, path: Path) -> int:
    """Return the sum of the allocated and the requested bytes in PyTorch's message."""
    tried, allocated = _TRIED.search(text), _ALLOCATED.search(text)
    if tried is None or allocated is None:
        raise UserError(
            f"--fix-oom {path} has no memory error of PyTorch (Tried to allocate ..., ... is allocated by PyTorch): "
            "give the output of the run, or a snapshot whose name ends in .pickle"
        )
    return sum(int(float(size) * _UNITS[unit]) for size, unit in (tried.groups(), allocated.groups()))


def _peak(path: Path) -> int:
    """Return the peak bytes in use according to the events of a snapshot."""
    with path.open("rb") as file:
        snapshot = unpickling.read_plain(file, f"--fix-oom {path}")
    held = sum(segment["allocated_size"] for segment in snapshot["segments"])
    peak = held
    for event in reversed([event for trace in snapshot["device_traces"] for event in trace]):
        held += {"alloc": -1, "free_completed": 1}.get(event["action"], 0) * event["size"]
        peak = max(peak, held)
    return peak
