# SPDX-License-Identifier: Apache-2.0
"""A pipeline's timeline: each pass starts when its stage is free and its input has arrived."""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.bridge.autotune.time.schedule import Pass, Pipeline, passes


@dataclass(frozen=True, slots=True)
class Span:
    """A pass of a stage, in seconds from the start of the step."""

    stage: int
    start: float
    end: float
    work: Pass


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the passes of a pipeline."""

    forward: tuple[tuple[float, ...], ...]  # by stage and chunk
    backward: tuple[tuple[float, ...], ...]  # by stage and chunk
    message: float = 0.0  # from the end of a pass until its output has arrived at the next stage
    blocking: bool = False  # the sender waits for its messages, as Megatron-Core does without ``overlap_p2p_comm``

    def busy(self, stage: int) -> float:
        """Of one microbatch on ``stage``."""
        return sum(self.forward[stage]) + sum(self.backward[stage])


def simulate(pipeline: Pipeline, times: PassTimes) -> list[Span]:
    """All passes of all stages, in the order in which they end."""
    orders = [passes(pipeline, stage) for stage in range(pipeline.stages)]
    at, free = [0] * pipeline.stages, [0.0] * pipeline.stages
    arrived: dict[tuple[str, int, int], float] = {}
    spans: list[Span] = []
    waiting = [*range(pipeline.stages)]
    while waiting:
        stage = waiting.pop()
        while at[stage] < len(orders[stage]):
            work = orders[stage][at[stage]]
            needed = _needed(pipeline, stage, work)
            if needed is not None and needed not in arrived:
                break
            start = max(free[stage], arrived[needed] if needed else 0.0)
            took = (times.forward if work.kind == "forward" else times.backward)[stage][work.chunk]
            spans.append(Span(stage, start, start + took, work))
            at[stage] += 1
            free[stage] = start + took + times.message * times.blocking
            arrived[(work.kind, _position(pipeline, stage, work), work.microbatch)] = (
                start + took + (0.0 if pipeline.stages == 1 else times.message)
            )
            waiting += [(stage + 1) % pipeline.stages, (stage - 1) % pipeline.stages]
    return sorted(spans, key=lambda span: span.end)


def _position(pipeline: Pipeline, stage: int, work: Pass) -> int:
    """Of a chunk in the model: chunks of all stages in the order of layers."""
    return work.chunk * pipeline.stages + stage


def _needed(pipeline: Pipeline, stage: int, work: Pass) -> tuple[str, int, int] | None:
    """What must have arrived before ``work`` can start."""
    position, last = _position(pipeline, stage, work), pipeline.stages * pipeline.chunks - 1
    if work.kind == "forward":
        return ("forward", position - 1, work.microbatch) if position else None
    if position == last:
        return ("forward", last, work.microbatch)
    return ("backward", position + 1, work.microbatch)


def makespan(pipeline: Pipeline, times: PassTimes) -> float:
    """Seconds from the first pass to the end of the last.

    Long schedules repeat: two short ones give the time of a group of microbatches, which is then extrapolated.
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
    return max(span.end for span in simulate(pipeline, times))


def bound(pipeline: Pipeline, times: PassTimes) -> float:
    """A quick estimate of ``makespan``: the busiest stage, and the way through the others."""
    busy = [times.busy(stage) for stage in range(pipeline.stages)]
    slowest = max(range(pipeline.stages), key=busy.__getitem__)
    others = (sum(busy) - busy[slowest]) / pipeline.chunks
    messages = 2 * times.message * (pipeline.stages - 1)
    return busy[slowest] * pipeline.microbatches + others + messages
