# SPDX-License-Identifier: Apache-2.0
"""What models with gated delta nets may not say, by provider and by config, before a model is built."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from megatron.bridge.utils.errors import UserError
from tests.unit_tests.models.test_gpt_provider import toy
from tests.unit_tests.models.test_simple_families import provider_of

SIZES = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 0],
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_model_parallel_size": 4}, "linear_num_key_heads=2 cannot be shared among .*_size=4 x"),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
            "tensor_model_parallel_size=2 x context_parallel_size=2 ranks",
        ),
        ({"linear_num_value_heads": 3}, "linear_num_key_heads=2 does not divide linear_num_value_heads=3"),
        ({"linear_attention_freq": [1, 0, 1]}, "linear_attention_freq has 3 layers, num_layers=2"),
        ({"linear_attention_freq": [1, 2]}, r"linear_attention_freq=\[1, 2\] must hold"),
        ({"linear_attention_freq": None}, "linear_attention_freq is not set"),
        ({"linear_attention_freq": [0, 1], "mtp_num_layers": 1}, "needs attention in the last layer"),
        ({"activation_func": F.gelu}, "activation_func must be SiLU"),
        ({"norm_placement": "post"}, "norm_placement='post' is not supported in a model with gated delta nets"),
        ({"qk_norm_across_heads": True}, "qk_norm_across_heads=True is not supported"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant='dsa' is not supported"),
        ({"experimental_attention_variant": None}, "linear_attention_freq has no effect without"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        toy(**SIZES | changes).finalize()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "must say full_attention or linear"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: gated delta nets have 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    ],
)
def test_what_a_config_may_not_say(changes, message):
    with pytest.raises(UserError, match=message):
        provider_of("qwen3_next", **changes)


@pytest.mark.parametrize(
    ("kinds", "frequency"),
    [
        ("lfll", [1, 0, 1, 1]),
        ("llfl", 3),
        ("lflf", 2),
        ("llll", 5),
        ("ffff", 1),
        ("lllf", 4),
        ("flll", [0, 1, 1, 1]),
    ],
)
def test_a_regular_pattern_is_a_number(kinds, frequency):
    names = {"l": "linear_attention", "f": "full_attention"}
    provider = provider_of("qwen3_next", layer_types=[names[kind] for kind in kinds])
    assert provider.linear_attention_freq == frequency


def test_norm_within_a_zero_centred_model_starts_at_one():
    provider = toy(**SIZES, layernorm_zero_centered_gamma=True)
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    first, second = chunk.decoder.layers
    assert isinstance(first.self_attention, GatedDeltaNet)
    assert not isinstance(second.self_attention, GatedDeltaNet)
    assert torch.equal(first.self_attention.out_norm.weight, torch.ones(5))
    assert torch.equal(first.input_layernorm.weight, torch.zeros(32))
