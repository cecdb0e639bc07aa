# SPDX-License-Identifier: Apache-2.0
"""Layers that differ: what may be said of them, and that each has the size that is said."""

import copy

import pytest
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP

from megatron.bridge import AutoBridge
from megatron.bridge.utils.errors import UserError
from tests.families.own_models import DeciLMForCausalLM
from tests.families.rows import ROWS
from tests.families.rows.deci import block


def provider_of(row="deci", **changes):
    config = DeciLMForCausalLM.config_class(
        **{**ROWS[row].config, **changes}, architectures=["DeciLMForCausalLM"]
    )
    return AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)


def with_first(part, **changes):
    """The blocks of the row, the first of which has other values in one part."""
    blocks = copy.deepcopy(ROWS["deci"].config["block_configs"])
    blocks[0][part] |= changes
    return blocks


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            with_first("attention", n_heads_in_group=4),
            r"\[0\].attention.n_heads_in_group=4 does not divide .*=6",
        ),
        (
            with_first("attention", no_op=True),
            r"\[0\].attention.n_heads_in_group=1 does not fit no_op",
        ),
        (with_first("ffn", ffn_mult=None), r"\[0\].ffn.ffn_mult=None does not fit no_op"),
        (
            with_first("ffn", no_op=True, replace_with_linear=True),
            r"\[0\].ffn has no_op and replace_with_linear",
        ),
        (
            with_first("attention", window_length=8),
            r"\[0\].attention.window_length=8 is not supported",
        ),
        (
            with_first("ffn", ffn_mul=2.0),
            r"\[0\].ffn.ffn_mul=2.0 is not supported; did you mean .*ffn_mult",
        ),
        ([{"attention": {}}] * 4, r"\[0\] has the keys attention: it must have attention and ffn"),
    ],
)
def test_what_a_block_may_not_say(blocks, message):
    with pytest.raises(UserError, match=message):
        provider_of(block_configs=blocks).finalize()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_model_parallel_size": 4},
            r"size=4 neither divides .* the 6 groups .* block_configs\[0\]",
        ),
        ({"num_query_groups": 2}, "num_query_groups=2 has no effect with block_configs"),
        ({"ffn_hidden_size": 64}, "ffn_hidden_size=64 has no effect with block_configs"),
        ({"make_query_groups_divisible_by": 4}, "make_query_groups_divisible_by=4 has no effect"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 has no effect"),
        ({"num_layers": 2}, "block_configs has 4 layers, num_layers=2: describe each"),
    ],
)
def test_what_a_provider_may_not_say(changes, message):
    provider = provider_of()
    for name, value in changes.items():
        setattr(provider, name, value)
    with pytest.raises(UserError, match=message):
        provider.finalize()


def test_a_number_of_layers_that_is_not_described():
    with pytest.raises(UserError, match="block_configs has 4 layers, num_hidden_layers=5"):
        provider_of(num_hidden_layers=5)


def test_each_layer_has_its_size():
    (chunk,) = provider_of().provide_distributed_model(wrap_with_ddp=False)
    first, second, third, last = chunk.decoder.layers
    assert [layer.self_attention.linear_qkv.weight.shape[0] for layer in (first, third)] == [
        18 * 8,
        10 * 8,
    ]
    assert isinstance(second.self_attention, IdentityOp)
    assert [layer.mlp.config.ffn_hidden_size for layer in (first, second, third)] == [256, 256, 512]
    assert not isinstance(last.mlp, MLP)
    assert second.input_layernorm.state_dict() == last.pre_mlp_layernorm.state_dict() == {}


def test_the_sizes_of_the_hub():
    """Of Llama-3_3-Nemotron-Super-49B-v1: 5.25 is Llama-3-70B's width, what it was cut from."""
    blocks = [block(8, mult) for mult in (5.25, 2.625, 1.0, 0.5)]
    provider = provider_of(hidden_size=8192, num_attention_heads=64, block_configs=blocks)
    parameters = provider.per_block_parameters
    assert [layer.mlp.ffn_hidden_size for layer in parameters] == [28672, 14336, 5632, 2816]
    assert {layer.attention.num_query_groups for layer in parameters} == {8}
