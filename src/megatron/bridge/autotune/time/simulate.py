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
class PassSpan:
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
    blocking: bool = (
        False  # the sender waits for its messages, as in Megatron-Core without ``overlap_p2p_comm``
    )

    def busy(self, stage: int) -> float:
        """Return the seconds of one microbatch on ``stage``."""
        return sum(self.forward[stage]) + sum(self.backward[stage])


def simulate(pipeline: Pipeline, times: PassTimes) -> list[PassSpan]:
    """Return the passes of all stages in the order in which they end."""
    return sorted(starmap(PassSpan, _simulate_passes(pipeline, times)), key=lambda span: span.end)


def _simulate_passes(
    pipeline: Pipeline, times: PassTimes
) -> Iterator[tuple[int, float, float, Pass]]:
    """Yield stage, start and end of each pass."""
    stages = pipeline.stages
    durations = {"forward": times.forward, "backward": times.backward}
    travel = 0.0 if stages == 1 else times.message
    blocked = times.message * times.blocking
    queues = [
        deque(zip(passes(pipeline, stage), _awaited_outputs(pipeline, stage), strict=True))
        for stage in range(stages)
    ]
    free = [0.0] * stages
    arrived: dict[_Input | None, float] = {None: 0.0}
    waiting: dict[_Input, int] = {}  # stages by the input that they wait for
    ready = [*range(stages)]
    while ready:
        stage = ready.pop()
        queue = queues[stage]
        while queue:
            work, needed = queue[0]
            position = work.chunk * stages + stage
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


@lru_cache(maxsize=4096)
def _awaited_outputs(pipeline: Pipeline, stage: int) -> tuple[_Input | None, ...]:
    """Return the output that each pass of ``stage`` waits for; positions of chunks follow the order of layers.

    The first stage (of backward passes the last) waits for what the other end sends as soon as that is sent, although a
    later pass needs it if groups are larger than the pipeline.
    """
    stages = pipeline.stages
    last = pipeline.stages * pipeline.chunks - 1
    done: dict[str, list[Pass]] = {"forward": [], "backward": []}
    sources: list[_Input] = []
    for work in passes(pipeline, stage):
        position = work.chunk * stages + stage
        backward = work.kind == "backward"
        earlier = done[work.kind]
        source = (work.kind, position + 2 * backward - 1, work.microbatch)
        if backward and position == last:
            source = ("forward", last, work.microbatch)
        elif pipeline.chunks > 1 and len(earlier) >= stages and stage == (stages - 1) * backward:
            sent = earlier[-stages]
            if (sent.chunk > 0) if backward else (sent.chunk < pipeline.chunks - 1):
                source = (work.kind, sent.chunk * stages + stages - 1 - stage, sent.microbatch)
        earlier.append(work)
        sources.append(source)
    return tuple(source if source[1] >= 0 else None for source in sources)


def makespan(pipeline: Pipeline, times: PassTimes) -> float:
    """Return the seconds from the first pass to the end of the last.

    Long schedules repeat, so the time of a group of microbatches is extrapolated from two short schedules.
    """
    group = pipeline.group if pipeline.chunks > 1 else pipeline.stages
    short = 4 * group + pipeline.microbatches % group
    if pipeline.microbatches <= short + group:
        return _end_of_last_pass(pipeline, times)
    first = _end_of_last_pass(replace(pipeline, microbatches=short), times)
    second = _end_of_last_pass(replace(pipeline, microbatches=short + group), times)
    return first + (second - first) * (pipeline.microbatches - short) / group


@lru_cache(maxsize=1024)
def _end_of_last_pass(pipeline: Pipeline, times: PassTimes) -> float:
    return max(end for _, _, end, _ in _simulate_passes(pipeline, times))


def bound(pipeline: Pipeline, times: PassTimes) -> float:
    """Estimate ``makespan`` quickly: the busiest stage plus the path through the others."""
    busy = [times.busy(stage) for stage in range(pipeline.stages)]
    slowest = max(range(pipeline.stages), key=busy.__getitem__)
    other_stages = (sum(busy) - busy[slowest]) / pipeline.chunks
    messages = 2 * times.message * (pipeline.stages - 1)
    return busy[slowest] * pipeline.microbatches + other_stages + messages
