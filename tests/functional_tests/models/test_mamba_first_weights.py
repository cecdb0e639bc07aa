# SPDX-License-Identifier: Apache-2.0
"""A new model has the same Mamba layers, however many ranks share them."""

import math

import pytest
import torch

from tests.toy_run import _place, local_shards, toy_config, whole_weights
from tests.workers import forget_model_parallel

MODEL = {
    "hybrid_override_pattern": "M-*M",
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "mamba_num_groups": 2,
    "mamba_state_dim": 5,
    "mamba_first_step_min": 0.01,
}


class Weights:
    """What ``whole_weights`` reads."""

    def __init__(self, chunks):
        self.shards = [
            (shard.key, shard.global_shape, _place(shard), shard.data.detach().numpy().copy())
            for shard in local_shards(chunks)
            if ".mixer." in shard.key
        ]


def build(layout):
    forget_model_parallel()  # of tests before, in this process
    provider = toy_config(model={**MODEL, **layout}).model
    provider.initialize_model_parallel(seed=7)
    found = Weights(provider.provide_distributed_model(wrap_with_ddp=False))
    forget_model_parallel()
    return found


def test_under_tensor_parallelism(two_workers):
    alone = whole_weights([build({})])
    shared = whole_weights(two_workers.run(build, {"tensor_model_parallel_size": 2}))
    assert alone.keys() == shared.keys()
    assert [name for name in alone if not torch.equal(alone[name], shared[name])] == []
    assert any("in_proj.weight.dt" in name for name in alone)


def test_first_numbers_are_where_they_should_be():
    weights = whole_weights([build({})])
    steps = torch.nn.functional.softplus(weights["decoder.layers.0.mixer.dt_bias"])
    rates = weights["decoder.layers.0.mixer.A_log"].exp()
    assert 0.0099 <= steps.min() < steps.max() <= 0.101
    assert 1 <= rates.min() < rates.max() <= 16
    kernel = torch.cat(
        [weights[f"decoder.layers.0.mixer.conv1d.weight.{kind}"].flatten() for kind in "xBC"]
    )
    assert kernel.abs().max() == pytest.approx(0.5, abs=0.02)
    assert kernel.std() == pytest.approx(0.5 / math.sqrt(3), rel=0.1)
    assert torch.equal(weights["decoder.layers.0.mixer.D"], torch.ones(8))
