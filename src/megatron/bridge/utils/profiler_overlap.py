# SPDX-License-Identifier: Apache-2.0
"""How much of a trace's communication ran while the rank also computed.

Communication and computation are sets of intervals of time. On a GPU they are its kernels: those of NCCL, and of
libraries that exchange tokens of experts, communicate; all others compute, and so do copies. On a CPU, gloo's messages
are ranges of its threads, and computation is what the operators of the main thread do that call no other operator.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

type Interval = tuple[float, float]
"""Start and end in microseconds."""

_COMMUNICATION = re.compile(r"^nccl|deep_ep|hybrid_ep|nvshmem", re.IGNORECASE)
_NCCL_KIND = re.compile(r"nccl(?:Dev|Sym)?k?(?:Kernel)?_([A-Za-z]+)", re.IGNORECASE)
_GLOO = "gloo:"
_STEP = re.compile(r"step (\d+)|ProfilerStep#(\d+)")
_ITEM_BYTES = {
    "Double": 8,
    "Long": 8,
    "Float": 4,
    "Int": 4,
    "Half": 2,
    "BFloat16": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}
"""Bytes of an element by the name that PyTorch's traces have for its type; of FP8 types, 1."""


@dataclass(frozen=True)
class Message:
    """A collective or a transfer between two ranks, as one rank sees it."""

    kind: str
    """Such as ``all_reduce``."""
    group: str
    """Description of the process group, or an empty string if the trace has none."""
    start: float
    """In microseconds, as ``end``."""
    end: float
    size: int | None
    """Bytes that this rank passed in, or that came out if they are more; None if the trace does not say."""

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class KindOverlap:
    """The messages of one kind and group."""

    kind: str
    group: str
    count: int
    seconds: float
    """Time in which at least one of them is under way."""
    exposed: float
    """The part of it in which the rank does not compute, in seconds."""
    size: int | None
    """Bytes of all of them; None if the trace does not say."""


@dataclass(frozen=True)
class Overlap:
    """One rank's time from the start of its first step to the end of its last one, in seconds."""

    seconds: float
    computing: float
    communicating: float
    hidden: float
    """Communication during computation."""
    kinds: tuple[KindOverlap, ...]
    """The longest first."""
    compute_intervals: tuple[Interval, ...]
    messages: tuple[Message, ...]
    window: Interval

    @property
    def exposed(self) -> float:
        """Communication without computation."""
        return self.communicating - self.hidden

    @property
    def idle(self) -> float:
        """Neither of both."""
        return self.seconds - self.computing - self.exposed


def analyze(events: Iterable[dict[str, Any]]) -> Overlap | None:
    """Return the overlap of a rank's events; None if they contain neither kernels nor operators.

    Args:
        events: ``traceEvents`` of a trace of PyTorch's profiler.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    window = _window(spans)
    kernels = [
        event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    if kernels:
        messages = [_kernel_message(event) for event in kernels if _communicates(event)]
        computing = [_interval(event) for event in kernels if not _communicates(event)]
    else:
        messages = [_gloo_message(event) for event in spans if event["name"].startswith(_GLOO)]
        computing = list(_leaf_operators(spans))
    if window is None or not computing:
        return None
    messages = [message for message in messages if _clipped([message.interval], window)]
    compute_union = _union(_clipped(computing, window))
    all_messages = _union(_clipped([message.interval for message in messages], window))
    return Overlap(
        seconds=_seconds([window]),
        computing=_seconds(compute_union),
        communicating=_seconds(all_messages),
        hidden=_seconds(_intersection(all_messages, compute_union)),
        kinds=_by_kind(messages, compute_union, window),
        compute_intervals=tuple(compute_union),
        messages=tuple(messages),
        window=window,
    )


def _window(spans: list[dict[str, Any]]) -> Interval | None:
    """Return the time from the first step to the end of the last, or of all events if no step is marked.

    Steps are ranges of the CPU, which runs ahead of a GPU: its last kernels belong to the last step.
    """
    if not spans:
        return None
    steps = [_interval(span) for span in spans if _STEP.fullmatch(span["name"])]
    ends = [_interval(span)[1] for span in spans if span.get("cat") == "kernel"]
    chosen = steps or [_interval(span) for span in spans if span.get("cat") != "Trace"]
    if not chosen:
        return None
    return min(start for start, _ in chosen), max([end for _, end in chosen] + ends)


def _interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _communicates(event: dict[str, Any]) -> bool:
    return _COMMUNICATION.search(event["name"]) is not None


def _kernel_message(event: dict[str, Any]) -> Message:
    arguments = event.get("args", {})
    name = _NCCL_KIND.match(event["name"])
    kind = arguments.get("Collective name") or (name[1] if name else event["name"].split("(")[0])
    elements = [arguments.get(f"{way} msg nelems") for way in ("In", "Out")]
    known = [count for count in elements if count is not None]
    item_bytes = _ITEM_BYTES.get(arguments.get("dtype", ""), 1)
    return Message(
        kind=_spelled(kind),
        group=arguments.get("Process Group Description", ""),
        start=event["ts"],
        end=event["ts"] + event["dur"],
        size=max(known) * item_bytes if known else None,
    )


def _gloo_message(event: dict[str, Any]) -> Message:
    start, end = _interval(event)
    return Message(_spelled(event["name"].removeprefix(_GLOO)), "", start, end, None)


_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "sendrecv": "send_receive",
    "send": "send_receive",
    "recv": "send_receive",
}


def _spelled(kind: str) -> str:
    """Return one name for the names that libraries and versions have for a kind."""
    plain = kind.lower().strip("_").removesuffix("_base").replace("_", "")
    return _KINDS.get(plain, kind)


def _leaf_operators(spans: list[dict[str, Any]]) -> Iterator[Interval]:
    """Yield the operators of the main thread that call no other; one that waits for a message calls it."""
    marked = [span["tid"] for span in spans if _STEP.fullmatch(span["name"])]
    operators = [span for span in spans if span.get("cat") == "cpu_op"]
    main = marked[0] if marked else None
    own = [span for span in operators if main is None or span["tid"] == main]
    own.sort(key=lambda span: (span["ts"], -span["dur"]))
    for index, span in enumerate(own):
        start, end = _interval(span)
        is_leaf = index + 1 == len(own) or own[index + 1]["ts"] >= end
        if is_leaf and not span["name"].startswith("c10d::"):
            yield start, end


def _by_kind(
    messages: list[Message], computing: list[Interval], window: Interval
) -> tuple[KindOverlap, ...]:
    groups: dict[tuple[str, str], list[Message]] = {}
    for message in messages:
        groups.setdefault((message.kind, message.group), []).append(message)
    overlaps = []
    for (kind, group), members in groups.items():
        intervals = _union(_clipped([message.interval for message in members], window))
        seconds = _seconds(intervals)
        sizes = [message.size for message in members]
        known = [size for size in sizes if size is not None]
        overlaps.append(
            KindOverlap(
                kind=kind,
                group=group,
                count=len(members),
                seconds=seconds,
                exposed=seconds - _seconds(_intersection(intervals, computing)),
                size=sum(known) if len(known) == len(sizes) else None,
            )
        )
    return tuple(sorted(overlaps, key=lambda overlap: -overlap.seconds))


def _clipped(intervals: list[Interval], window: Interval) -> list[Interval]:
    low, high = window
    parts = [(max(start, low), min(end, high)) for start, end in intervals]
    return [(start, end) for start, end in parts if start < end]


def _union(intervals: list[Interval]) -> list[Interval]:
    """Return disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the parts that are in both of two unions."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def _seconds(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals) / 1e6
