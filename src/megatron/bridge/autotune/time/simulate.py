# SPDX-License-Identifier: Apache-2.0
"""Simulate a pipeline: each pass starts when its stage is free and its input has arrived."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import starmap

from megatron.bridge.autotune.time.schedule import Pass, Pipeline, passes

_Input = tuple[str, int, int]
"""An output that another pass needs: kind of pass, position of its chunk in the model, and microbatch."""


@dataclass(frozen=True, slots=True)
class Span:
    """A pass of a stage; start and end are seconds from the start of the step."""

    stage: int
    start: float
    end: float
    work: Pass


@dataclass(frozen=True)
class PassTimes:
    """Durations of the passes of a pipeline in seconds."""

    forward: tuple[tuple[float, ...], ...]  # by stage and chunk
    backward: tuple[tuple[float, ...], ...]  # by stage and chunk
    message: float = 0.0  # from the end of a pass until its output has arrived at the next stage
    blocking: bool = False  # the sender waits for its messages, as in Megatron-Core without ``overlap_p2p_comm``

    def busy(self, stage: int) -> float:
        """Return the seconds of one microbatch on ``stage``."""
        return sum(self.forward[stage]) + sum(self.backward[stage])


def simulate(pipeline: Pipeline, times: PassTimes) -> list[Span]:
    """Return the passes of all stages in the order in which they end."""
    return sorted(starmap(Span, _run(pipeline, times)), key=lambda span: span.end)


def _run(pipeline: Pipeline, times: PassTimes) -> Iterator[tuple[int, float, float, Pass]]:
    """Yield stage, start and end of each pass."""
    stages, last = pipeline.stages, pipeline.stages * pipeline.chunks - 1
    durations = {"forward": times.forward, "backward": times.backward}
    travel, blocked = (0.0 if stages == 1 else times.message), times.message * times.blocking
    queues = [deque(passes(pipeline, stage)) for stage in range(stages)]
    free = [0.0] * stages
    arrived: dict[_Input | None, float] = {None: 0.0}
    waiting: dict[_Input, int] = {}  # stages by the input that they wait for
    ready = [*range(stages)]
    while ready:
        stage = ready.pop()
        queue = queues[stage]
        while queue:
            work = queue[0]
            position = work.chunk * stages + stage
            needed = _needed(work, position, last)
            if needed is not None and needed not in arrived:
                waiting[needed] = stage
                break
            queue.popleft()
            start = max(free[stage], arrived[needed])
            end = start + durations[work.kind][stage][work.chunk]
            yield stage, start, end, work
            free[stage] = end + blocked
            output = work.kind, position, work.microbatch
            arrived[output] = end + travel
            if output in waiting:
                ready.append(waiting.pop(output))


def _needed(work: Pass, position: int, last: int) -> _Input | None:
    """Return the input that ``work`` needs before it can start; positions of chunks follow the order of layers."""
    if work.kind == "forward":
        return ("forward", position - 1, work.microbatch) if position else None
    if position == last:
        return ("forward", last, work.microbatch)
    return ("backward", position + 1, work.microbatch)


def makespan(pipeline: Pipeline, times: PassTimes) -> float:
    """Return the seconds from the first pass to the end of the last.

    Long schedules repeat, so the time of a group of microbatches is extrapolated from two short schedules.
    """
    group = pipeline.group if pipeline.chunks > 1 else pipeline.stages
    short = 4 * group + pipeline.microbatches % group
    if pipeline.microbatches <= short + group:
        return _end(pipeline, times)
    first = _end(replace(pipeline, microbatches=short), times)
    second = _end(replace(pipeline, microbatches=short + group), times)
    return first + (second - first) * (pipeline.microbatches - short) / group


@lru_cache(maxsize=1024)
def _end(pipeline: Pipeline, times: PassTimes) -> float:
    return max(end for _, _, end, _ in _run(pipeline, times))


def bound(pipeline: Pipeline, times: PassTimes) -> float:
    """Estimate ``makespan`` quickly: the busiest stage plus the path through the others."""
    busy = [times.busy(stage) for stage in range(pipeline.stages)]
    slowest = max(range(pipeline.stages), key=busy.__getitem__)
    others = (sum(busy) - busy[slowest]) / pipeline.chunks
    messages = 2 * times.message * (pipeline.stages - 1)
    return busy[slowest] * pipeline.microbatches + others + messages
