# SPDX-License-Identifier: Apache-2.0
"""The order of the forward and backward passes of a pipeline stage, as Megatron-Core's three schedules run them.

The rules are those of ``megatron.core.pipeline_parallel.schedules`` (version 0.19): no pipeline, 1F1B, and
interleaved 1F1B with groups of microbatches. A test runs the functions of that module and compares the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.resolve.context_sharing import microbatch_tokens

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a microbatch through a chunk of layers."""

    kind: Kind
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Pipeline:
    """The settings that decide the order of passes."""

    stages: int  # pipeline ranks
    microbatches: int  # per step and data-parallel replica
    chunks: int = 1  # virtual stages on each rank
    # ``microbatch_group_size_per_vp_stage``: microbatches that run through one chunk before the next chunk runs
    group: int = 1
    forward_only: bool = False  # evaluation and inference run no backward pass
    overlap_experts: bool = (
        False  # ``overlap_moe_expert_parallel_comm``, which runs one more forward pass in advance
    )

    def warmup(self, stage: int) -> int:
        """Return the number of forward passes of ``stage`` before its first pair of forward and backward passes."""
        total = self.microbatches * self.chunks
        if self.forward_only:
            return total
        if self.stages == 1:
            return min(int(self.overlap_experts), total)
        ahead = self.stages - stage - 1
        if self.chunks > 1:
            ahead = 2 * ahead + (self.chunks - 1) * self.group + self.overlap_experts
        return min(ahead, total)


@lru_cache(maxsize=4096)
def passes(pipeline: Pipeline, stage: int) -> tuple[Pass, ...]:
    """Return the passes of ``stage`` in the order in which they run."""
    order = _chunk_order(pipeline)
    forward = [Pass("forward", microbatch, chunk) for microbatch, chunk in order]
    if pipeline.forward_only:
        return tuple(forward)
    last = pipeline.chunks - 1
    backward = [Pass("backward", microbatch, last - chunk) for microbatch, chunk in order]
    warmup = pipeline.warmup(stage)
    steady = [work for pair in zip(forward[warmup:], backward, strict=False) for work in pair]
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup :])


def _chunk_order(pipeline: Pipeline) -> list[tuple[int, int]]:
    """Return microbatch and chunk of each forward pass: a group of microbatches runs through all chunks in turn."""
    group = pipeline.group if pipeline.chunks > 1 else pipeline.microbatches
    return [
        (microbatch, chunk)
        for start in range(0, pipeline.microbatches, group)
        for chunk in range(pipeline.chunks)
        for microbatch in range(start, min(start + group, pipeline.microbatches))
    ]


def held_counts(pipeline: Pipeline, stage: int) -> list[tuple[Pass, tuple[int, ...]]]:
    """Return each pass of ``stage``, and how many microbatches each chunk holds during it, including its own."""
    held = [0] * pipeline.chunks
    counts = []
    for work in passes(pipeline, stage):
        held[work.chunk] += work.kind == "forward"
        counts.append((work, tuple(held)))
        held[work.chunk] -= work.kind == "backward"
    return counts


@lru_cache(maxsize=4096)
def distinct_moments(
    pipeline: Pipeline, stage: int
) -> tuple[tuple[Kind, int, tuple[int, ...]], ...]:
    """Return the moments that differ in memory: kind and chunk of a pass, and the microbatches that chunks hold."""
    return tuple(
        dict.fromkeys((work.kind, work.chunk, held) for work, held in held_counts(pipeline, stage))
    )


def short_pipeline(pipeline: Pipeline) -> Pipeline:
    """Return the same schedule with fewer microbatches that has the same distinct moments."""
    group = pipeline.group if pipeline.chunks > 1 else pipeline.stages
    enough = (
        pipeline.warmup(0) // pipeline.chunks // group * group
        + 3 * group
        + pipeline.microbatches % group
    )
    return replace(pipeline, microbatches=min(pipeline.microbatches, enough))


def most_held(
    pipeline: Pipeline, stage: int, sizes: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return how many microbatches each chunk holds at the peak of ``stage``.

    ``sizes`` are the bytes that each chunk saves for one microbatch; None means that they are equal.
    """
    weights = [1.0] * pipeline.chunks if sizes is None else sizes
    mixes = [held for _, _, held in distinct_moments(pipeline, stage)]
    return max(
        mixes, key=lambda held: sum(count * size for count, size in zip(held, weights, strict=True))
    )


def pipeline_of(config: ConfigContainer, world_size: int) -> Pipeline:
    """Return the schedule of a step of a config whose layout has been checked."""
    model = config.model
    train = config.train
    stages = model.pipeline_model_parallel_size
    chunks = model.virtual_pipeline_model_parallel_size or 1
    tokens_of_rank = (
        train.global_batch_size
        * config.dataset.seq_length
        // (config.data_parallel_size(world_size) * model.context_parallel_size)
    )
    microbatches = tokens_of_rank // microbatch_tokens(config)
    return Pipeline(
        stages=stages,
        microbatches=max(microbatches, 1),
        chunks=chunks,
        group=(model.microbatch_group_size_per_vp_stage or stages) if chunks > 1 else 1,
        overlap_experts=bool(model.overlap_moe_expert_parallel_comm),
    )
