# SPDX-License-Identifier: Apache-2.0
"""Memory of each rank as it is counted, against what models, buffers and optimizers of several processes hold."""

import pytest
from megatron.core import parallel_state

from megatron.bridge.autotune.memory import memory_per_rank
from tests.unit_tests.autotune.models import provider
from tests.unit_tests.autotune.test_memory import (
    built,
    configured,
    gradient_buffers,
    optimizer_state,
    size,
)
from tests.workers import forget_model_parallel

TP, PP, VP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "virtual_pipeline"))
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP = {TP: 2, "sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}
BUCKETS = {**SHARDED, "overlap_grad_reduce": True, "bucket_size": 100_000}
WHOLE = {"use_distributed_optimizer": False}

DENSE = [{}, {PP: 2}, {PP: 2, VP: 2}, SP, {TP: 2}, {CP: 2}]
FOUR = [{TP: 4}, {PP: 4}, {**SP, PP: 2}, {**SP, CP: 2}, {PP: 2, VP: 2, TP: 2}]
EXPERTS = [
    {EP: 2},
    {EP: 4},
    {EP: 2, PP: 2},
    {**SP, EP: 2, ETP: 1},
    {**SP, EP: 2, ETP: 2},
    {**SP, EP: 4, ETP: 1},
]


def config_of(family, layout, ddp):
    config = configured(provider(family, layers=4, **layout))
    for name, value in ddp.items():
        setattr(config.ddp, name, value)
    return config


def measured(family, layout, ddp):
    chunks, optimizer = built(config_of(family, layout, ddp).resolve().config)
    weights = [
        weight for chunk in chunks for weight in (*chunk.parameters(), *chunk.module.buffers())
    ]
    storages = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights
    }
    gradients, state = gradient_buffers(chunks), optimizer_state(optimizer)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return stage, sum(storages.values()), size(gradients), size(state)


def all_measured(cases):
    found = []
    for case in cases:
        found.append(measured(*case))
        forget_model_parallel()
    return found


def assert_counted(case, ranks):
    """The fullest rank of each stage holds what is counted, to the byte."""
    memory = memory_per_rank(config_of(*case).resolve(len(ranks)).config, len(ranks))
    for expected in memory:
        stage = [rank[1:] for rank in ranks if rank[0] == expected.stage]
        counted = (expected.weights, expected.gradients, expected.optimizer)
        assert counted == tuple(map(max, zip(*stage, strict=True))), (case, expected.stage)


@pytest.mark.parametrize(
    "case",
    [
        ("llama", {}, SHARDED),
        ("gemma2", SP, SHARDED),
        ("gemma2", {PP: 2}, BUCKETS),
        ("qwen3_moe", {EP: 2}, SHARDED),
        ("llama", {PP: 2, VP: 2}, WHOLE),
    ],
    ids=lambda case: " ".join((case[0], *map(str, case[1].values()))),
)
def test_states_are_those_of_each_rank(two_workers, case):
    assert_counted(case, two_workers.run(measured, *case))


CASES = {
    "dense": [("llama", layout, SHARDED) for layout in (*DENSE, *FOUR)],
    "buckets": [("llama", layout, BUCKETS) for layout in ({}, {PP: 2}, SP, {PP: 2, VP: 2})],
    "whole": [("qwen3", layout, WHOLE) for layout in ({}, {PP: 2, VP: 2}, SP)],
    "tied": [("gemma2", layout, SHARDED) for layout in ({}, {PP: 2}, SP, {**SP, PP: 2})],
    "experts": [("qwen3_moe", layout, SHARDED) for layout in EXPERTS],
    "buckets of experts": [("qwen3_moe", layout, BUCKETS) for layout in EXPERTS[:3]],
    "latents": [("deepseek_v3", layout, SHARDED) for layout in (*EXPERTS[:4], {PP: 2}, SP)],
    "biases": [("gpt_oss", layout, SHARDED) for layout in (*EXPERTS[:3], {PP: 2}, SP)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_states_of_forty_layouts_are_those_of_each_rank(four_workers, kind):
    found = zip(*four_workers.run(all_measured, CASES[kind]), strict=True)
    for case, ranks in zip(CASES[kind], found, strict=True):
        assert_counted(case, ranks)
