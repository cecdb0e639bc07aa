# SPDX-License-Identifier: Apache-2.0
"""What models with gated delta nets or short convolutions may not say, before a model is built."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from transformers import Qwen3NextConfig

from megatron.bridge import AutoBridge
from megatron.bridge.utils.errors import UserError
from tests.families import harness, published
from tests.families.qwen3_next_layer import add_layer
from tests.unit_tests.models.test_gpt_provider import toy
from tests.unit_tests.models.test_simple_families import provider_of

PUBLISHED = Path(published.__path__[0])
SIZES = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 0],
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA = {
    "mamba_layers": [1, 0],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_state_dim": 6,
    "mamba_num_groups": 1,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_model_parallel_size": 4},
            "linear_num_key_heads=2 cannot be shared among .*_size=4 x",
        ),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
            "tensor_model_parallel_size=2 x context_parallel_size=2 ranks",
        ),
        (
            {"linear_num_value_heads": 3},
            "linear_num_key_heads=2 does not divide linear_num_value_heads=3",
        ),
        ({"linear_attention_freq": [1, 0, 1]}, "linear_attention_freq has 3 layers, num_layers=2"),
        ({"linear_attention_freq": [1, 2]}, r"linear_attention_freq=\[1, 2\] must hold"),
        ({"linear_attention_freq": None}, "linear_attention_freq is not set"),
        (
            {"linear_attention_freq": [0, 1], "mtp_num_layers": 1},
            "needs attention in the last layer",
        ),
        ({"activation_func": F.gelu}, "activation_func must be SiLU"),
        (
            {"norm_placement": "post"},
            "norm_placement='post' is not supported in a model with gated delta nets",
        ),
        ({"qk_norm_across_heads": True}, "qk_norm_across_heads=True is not supported"),
        (
            {"experimental_attention_variant": "dsa"},
            "experimental_attention_variant='dsa' is not supported",
        ),
        ({"experimental_attention_variant": None}, "linear_attention_freq has no effect without"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        toy(**SIZES | changes).finalize()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
            "layer_types='sliding_attention' is not supported",
        ),
        (
            {"hidden_act": "gelu"},
            "hidden_act='gelu' is not supported: layers without attention have 'silu'",
        ),
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


def test_further_predictions_are_carried_over(tmp_path):
    """Transformers leaves the layer out: its tensors come back as they are, though nothing was converted."""
    case = harness.Case("qwen3_next", tmp_path)
    harness.save(harness.hf_model(case.row), case.checkpoint)
    (case.checkpoint / "README.md").write_text("The card of a toy.\n")
    add_layer(case.checkpoint)
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    (chunk,) = model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert not any(name.startswith("mtp") for name, _ in chunk.named_parameters())
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert harness.different_files(case, tmp_path / "out") == []


@pytest.mark.slow  # a plan of 25,000 experts
def test_published_count_with_further_predictions():
    """The files on the hub, which have one such layer, add up to this."""
    config = Qwen3NextConfig.from_pretrained(PUBLISHED / "Qwen--Qwen3-Next-80B-A3B-Instruct.json")
    bridge = AutoBridge.from_hf_config(config)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.mtp_num_layers = 1
    tasks = bridge.plan(provider.meta_model()).tasks
    shapes = {
        name: shape for task in tasks if not task.is_copy for name, shape in task.hf_shapes.items()
    }
    assert sum(math.prod(shape) for shape in shapes.values()) == 81_324_862_720


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"context_parallel_size": 3},
            "context_parallel_size=3 x tensor_model_parallel_size=1 does not divide hidden_size=32",
        ),
        (
            {"tensor_model_parallel_size": 3},
            "tensor_model_parallel_size=3 does not divide hidden_size=32",
        ),
        ({"short_conv_layers": [1]}, "short_conv_layers has 1 layers, num_layers=2"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 is not supported with short_conv_layers"),
        (
            SIZES,
            "experimental_attention_variant='gated_delta_net' is not supported with short_conv_layers",
        ),
    ],
)
def test_what_short_convolutions_cannot_do(changes, message):
    with pytest.raises(UserError, match=message):
        toy(**{"short_conv_layers": [1, 0], **changes}).finalize()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"context_parallel_size": 3},
            "context_parallel_size=3 x tensor_model_parallel_size=1 does not divide mamba_num_heads=4",
        ),
        (
            {"tensor_model_parallel_size": 3},
            "tensor_model_parallel_size=3 does not divide mamba_num_heads=4",
        ),
        (
            {"tensor_model_parallel_size": 2, "mamba_state_dim": 5},
            "tensor_model_parallel_size=2 does not divide mamba_state_dim=5",
        ),
        ({"mamba_num_groups": 2}, "mamba_num_groups=2 is not supported with mamba_layers"),
        ({"mamba_layers": [1]}, "mamba_layers has 1 layers, num_layers=2"),
        (
            {"short_conv_layers": [0, 1]},
            r"mamba_layers=\[1, 0\] is not supported with short_conv_layers",
        ),
    ],
)
def test_what_mamba_layers_cannot_do(changes, message):
    with pytest.raises(UserError, match=message):
        toy(**{**MAMBA, **changes}).finalize()


@pytest.mark.parametrize("changes", [{"short_conv_layers": [1, 0]}, MAMBA])
def test_layers_do_not_see_other_samples(changes):
    (chunk,) = toy(**changes).provide_distributed_model(wrap_with_ddp=False)
    layer, x = chunk.decoder.layers[0].self_attention, torch.randn(9, 1, 32)
    bounds = torch.tensor([0, 2, 9], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    alone = torch.cat([layer(part)[0] for part in x.split([2, 7])])
    found, unpacked = layer(x, packed_seq_params=packed)[0], layer(x)[0]
    assert (found - alone).abs().max() <= 1e-6 * alone.abs().max()
    assert (unpacked - alone).abs().max() > 0.1 * alone.abs().max()
