# SPDX-License-Identifier: Apache-2.0
"""The order of passes against that of Megatron-Core's own schedules."""

import itertools

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from megatron.core.transformer import TransformerConfig

from megatron.bridge.autotune import meta_model
from megatron.bridge.autotune.time.schedule import Pass, Pipeline, held_counts, most_held, passes
from tests.one_stage import Group, NoNeighbors, run_stage


class Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, log, key):
        ctx.log, ctx.key = log, key
        log.append(Pass("forward", *key))
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(Pass("backward", *ctx.key))
        return gradient, None, None


class Chunk(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.received, self.model_type = config, None, None
        self.scale = torch.nn.Parameter(torch.ones(1, 1, 8))

    def set_input_tensor(self, tensors):
        (self.received,) = tensors


def order_of_megatron_core(pipeline, stage):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline.stages,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
    )
    config.microbatch_group_size_per_vp_stage = pipeline.group
    chunks = [Chunk(config) for _ in range(pipeline.chunks)]
    log, counts = [], [0] * pipeline.chunks

    def step(index, chunk):
        received = (
            chunk.scale.expand(4, 1, 8) if chunk.received is None else chunk.received * chunk.scale
        )
        output = Recorded.apply(received, log, (counts[index], index))
        counts[index] += 1
        return output, lambda tensor: (tensor.sum(), {})

    with meta_model._default_group():
        run_stage(
            step,
            chunks,
            config,
            pipeline.stages,
            stage,
            pipeline.microbatches,
            4,
            pipeline.forward_only,
        )
    return tuple(log)


PLAIN = [
    Pipeline(stages, microbatches, forward_only=forward_only)
    for stages, microbatches, forward_only in itertools.product(
        (1, 2, 3, 4, 8), (1, 3, 13), (False, True)
    )
]
INTERLEAVED = [
    Pipeline(stages, microbatches, chunks, group, forward_only)
    for stages, chunks, forward_only in itertools.product((2, 4), (2, 3), (False, True))
    for group in (stages, stages + 1)
    for microbatches in (group, 2 * group, 3 * group + stages)
    if not 0 < microbatches % group < stages
]


@pytest.mark.parametrize("pipeline", [*PLAIN, *INTERLEAVED], ids=str)
def test_order_is_that_of_megatron_core(pipeline):
    for stage in {0, pipeline.stages // 2, pipeline.stages - 1}:
        assert passes(pipeline, stage) == order_of_megatron_core(pipeline, stage)


@pytest.mark.parametrize("stage", range(4))
def test_overlap_of_experts_runs_one_more_forward_pass_ahead(stage):
    pipeline = Pipeline(4, 8, 2, 4, overlap_experts=True)
    communicator = NoNeighbors(
        Group(4, stage), TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    )
    communicator.virtual_pipeline_model_parallel_size = 2
    expected = get_pp_rank_microbatches(
        8, 2, 4, overlap_moe_expert_parallel_comm=True, p2p_communicator=communicator
    )
    assert pipeline.warmup(stage) == expected[2]


def test_worst_mix_of_unequal_chunks_comes_after_the_warmup():
    """Steady passes exchange microbatches of the last chunk for such of the first."""
    pipeline = Pipeline(4, 16, 2, 4)
    _, at_warmup = held_counts(pipeline, 0)[pipeline.warmup(0)]
    assert at_warmup == (7, 4)
    assert most_held(pipeline, 0, (3.0, 1.0)) == (8, 3)
    assert most_held(pipeline, 0, (1.0, 3.0)) == (7, 4)
