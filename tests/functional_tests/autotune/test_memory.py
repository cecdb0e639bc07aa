# SPDX-License-Identifier: Apache-2.0
"""Estimates of the memory of each rank, against what models, buffers and optimizers hold over two processes."""

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge.autotune.memory import memory_per_rank
from tests.unit_tests.autotune.models import provider
from tests.unit_tests.autotune.test_memory import built, configured, gradient_buffers, optimizer_state, size


def _measured(family, layout):
    config = configured(provider(family, layers=4, **layout))
    config = config.resolve().config
    chunks, optimizer = built(config)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    gradients, state = gradient_buffers(chunks), optimizer_state(optimizer)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return stage, sum(map(torch.numel, parameters)), size(gradients), size(state)


LAYOUTS = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "dp2"), ("gemma2", "tp2"), ("gemma2", "pp2"), ("qwen3_moe", "ep2"), ("llama", "vp2")]
)
def test_states_are_those_of_each_rank(two_workers, family, name):
    config = configured(provider(family, layers=4, **LAYOUTS[name]))
    config = config.resolve(2).config
    memory = memory_per_rank(config, 2)
    for stage, parameters, gradients, state in two_workers.run(_measured, family, LAYOUTS[name]):
        expected = memory[stage]
        assert (expected.parameters, expected.gradients) == (parameters, gradients)
        # a rank's share ends where a parameter's padding may begin
        assert state <= expected.optimizer <= 1.01 * state
