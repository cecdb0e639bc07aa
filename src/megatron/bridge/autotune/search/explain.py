# SPDX-License-Identifier: Apache-2.0
"""Explain why other layouts are worse, and find the fewest changes that make a layout fit.

How much more memory a run needed than predicted comes from its error, or from a memory snapshot.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.bridge.autotune.report import KINDS
from megatron.bridge.autotune.search.candidate import Candidate
from megatron.bridge.autotune.search.price import Price
from megatron.bridge.autotune.search.search import Search
from megatron.bridge.utils import unpickling
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError

_GB = 1e9


@dataclass(frozen=True)
class Reason:
    """Why a candidate is not the best; seconds and bytes of its fullest rank are None if a rule refuses it."""

    candidate: Candidate
    seconds: float | None
    memory: int | None
    text: str


def alternatives(search: Search, best: Price) -> Iterator[Reason]:
    """Yield the cost of each other value of each field."""
    plain = replace(best.candidate, layout=None)
    values = {**search.space.sizes, "recompute": search.recomputes}
    for name, choices in values.items():
        for value in choices:
            if value != getattr(plain, name):
                yield reason(search, best, replace(plain, **{name: value}))


def reason(search: Search, best: Price, candidate: Candidate) -> Reason:
    """Explain why ``candidate`` is worse than ``best``."""
    if problems := search.problems(candidate):
        return Reason(candidate, None, None, problems[0])
    price = search.price(candidate)
    if price is None:
        return Reason(candidate, None, None, "there are too few layers for so many stages")
    over = price.fullest - search.budget
    if over > 0:
        stage = price.memory.index(price.fullest)
        text = f"stage {stage} needs {over / _GB:.1f} GB more than the budget of {search.budget / _GB:.1f} GB"
        return Reason(candidate, price.seconds, price.fullest, text)
    return Reason(candidate, price.seconds, price.fullest, _slower_phrase(best, price))


def _slower_phrase(best: Price, price: Price) -> str:
    change = price.seconds / best.seconds - 1
    if change <= 0:
        return f"{-change:.1%} faster"
    grown = {
        name: price.prediction.split.get(name, 0.0) - seconds
        for name, seconds in best.prediction.split.items()
    }
    cause = max(grown, key=grown.__getitem__)
    return f"{change:.1%} slower: {KINDS[cause]} takes {grown[cause]:.3g} s more"


def pareto(prices: list[Price]) -> list[Price]:
    """Return the candidates that no other one beats in both time and memory, fastest first."""
    front: list[Price] = []
    for price in sorted(prices, key=lambda price: (price.seconds, price.fullest)):
        if not front or price.fullest < front[-1].fullest:
            front.append(price)
    return front


@dataclass(frozen=True)
class LayoutChange:
    """One change on the way to a layout that fits: the new value of a field of ``Candidate``.

    ``saved`` bytes of the fullest rank and ``lost`` seconds per step are None if a rule refuses one of the layouts.
    """

    name: str
    value: object
    saved: int | None
    lost: float | None


def nearest_fit(search: Search) -> Price | None:
    """Return the layout that fits with the fewest changes to the config's layout; of several, the fastest."""
    start = search.current
    ranked: dict[int, list[Candidate]] = {}
    for candidate in search.space.candidates():
        for recompute in dict.fromkeys((start.recompute, *search.recomputes)):
            recomputing = replace(candidate, recompute=recompute)
            ranked.setdefault(len(recomputing.changes(start)), []).append(recomputing)
    for changes in sorted(ranked):
        if fitting := [
            price
            for price in _priced_candidates(search, ranked[changes])
            if price.fullest <= search.budget
        ]:
            return min(fitting, key=lambda price: price.seconds)
    return None


def _priced_candidates(search: Search, candidates: list[Candidate]) -> Iterator[Price]:
    for candidate in candidates:
        if search.problems(candidate):
            continue
        states = search.pricer.states(candidate, search.pricer.configured(candidate))
        if states <= search.budget and (price := search.pricer.price(candidate)) is not None:
            yield price


def steps_to(search: Search, goal: Price) -> list[LayoutChange]:
    """Return the changes from the config's layout to ``goal``, one by one, with the savings and cost of each."""
    at = search.current
    before = None if search.problems(at) else search.pricer.price(at)
    steps: list[LayoutChange] = []
    for name, value in replace(goal.candidate, layout=None).changes(at):
        at = replace(at, **{name: value})
        price = None if search.problems(at) else search.pricer.price(at)
        known = price is not None and before is not None
        saved = before.fullest - price.fullest if known else None  # pyright: ignore
        lost = price.seconds - before.seconds if known else None  # pyright: ignore
        steps.append(LayoutChange(name, value, saved, lost))
        before = price or before
    return steps


_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = rf"(\d+(?:\.\d+)?) ({'|'.join(_UNITS)})"
_TRIED, _ALLOCATED = (
    re.compile(f"Tried to allocate {_SIZE}"),
    re.compile(f"{_SIZE} is allocated by PyTorch"),
)


def unpredicted(search: Search, path: Path) -> int:
    """Return at least how many bytes the config's layout needs beyond its prediction; 0 if it needs less."""
    needed = (
        _peak_of_snapshot(path)
        if path.suffix == ".pickle"
        else _of_error(read_text(path, f"--fix-oom {path}"), path)
    )
    price = None if search.problems(search.current) else search.price(search.current)
    reserve = search.pricer.reserve(search.current)
    return 0 if price is None else max(0, reserve.around(needed) - price.fullest)


def _of_error(text: str, path: Path) -> int:
    """Return the sum of the allocated and the requested bytes in PyTorch's message."""
    tried = _TRIED.search(text)
    allocated = _ALLOCATED.search(text)
    if tried is None or allocated is None:
        raise UserError(
            f"--fix-oom {path} has no memory error of PyTorch (Tried to allocate ..., ... is allocated by PyTorch): "
            "give the output of the run, or a snapshot whose name ends in .pickle"
        )
    return sum(
        int(float(size) * _UNITS[unit]) for size, unit in (tried.groups(), allocated.groups())
    )


def _peak_of_snapshot(path: Path) -> int:
    """Return the peak bytes in use according to the events of a snapshot."""
    with path.open("rb") as file:
        snapshot = unpickling.read_plain(file, f"--fix-oom {path}")
    held = sum(segment["allocated_size"] for segment in snapshot["segments"])
    peak = held
    for event in reversed([event for trace in snapshot["device_traces"] for event in trace]):
        held += {"alloc": -1, "free_completed": 1}.get(event["action"], 0) * event["size"]
        peak = max(peak, held)
    return peak
