# SPDX-License-Identifier: Apache-2.0
"""Norms after attention and MLP, norms over all heads, scaled residuals: each against its formula."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.backends.attention.torch_attention import TorchAttention
from megatron.bridge.backends.kernels.norms import AcrossHeadsNorm, TorchNorm
from megatron.bridge.backends.specs import layer_features, layer_specs
from megatron.bridge.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("one_rank")


def settings(features=None, **changes):
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "kv_channels": 6,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
    }
    config = TransformerConfig(**values | changes)
    for name, value in (features or {}).items():
        setattr(config, name, value)
    return config


def rms_norm(x, gain, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def with_gradients(function, *inputs):
    """The value of ``function`` and the gradients of a weighted sum of it."""
    inputs = [value.detach().clone().requires_grad_() for value in inputs]
    out = function(*inputs)
    weights = torch.linspace(-1.0, 1.0, out.numel()).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_over_all_heads(zero_centered):
    # three heads of four are true: the fourth is padding, zero, and no part of the mean
    config = settings(layernorm_zero_centered_gamma=zero_centered)
    norm = AcrossHeadsNorm(config, 4, 3, parallel_state.get_tensor_model_parallel_group())
    x = torch.randn(5, 2, 4, 6)
    x[:, :, 3] = 0.0
    gain = torch.randn(24)

    def ours(x, gain):
        return torch.func.functional_call(norm, {"weight": gain}, x)

    def naive(x, gain):
        true = rms_norm(
            x[:, :, :3].flatten(-2), gain[:18] + zero_centered, config.layernorm_epsilon
        )
        return torch.cat([true.view(5, 2, 3, 6), x[:, :, 3:] * 0.0], dim=2)

    found, expected = with_gradients(ours, x, gain), with_gradients(naive, x, gain)
    for index in range(3):
        one, other = found[index], expected[index]
        if index == 1:  # what reaches padding is dropped with it
            one, other = one[:, :, :3], other[:, :, :3]
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_residual_add(normed, bias):
    config = settings()
    add = layer_features.ResidualAdd(config, TorchNorm if normed else None, scale=0.3)
    gain = torch.randn(32)

    if normed:
        add.norm.weight.data = gain

    def added(x, residual, shift):
        return add(True, False)((x + 0.0 * shift, shift if bias else None), residual, 0.0)

    def naive(x, residual, shift):
        x = x + shift if bias else x + 0.0 * shift
        return residual + 0.3 * (rms_norm(x, gain, config.layernorm_epsilon) if normed else x)

    inputs = torch.randn(5, 2, 32), torch.randn(5, 2, 32), torch.randn(32)
    for one, other in zip(
        with_gradients(added, *inputs), with_gradients(naive, *inputs), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def layer(features, **changes):
    config = settings(features, **changes)
    block = layer_specs.decoder_block_spec(config, "torch")
    return block.layer_specs[0].submodules


def test_a_plain_config_has_no_feature():
    submodules = layer({})
    assert submodules.input_layernorm is submodules.pre_mlp_layernorm is TorchNorm
    assert submodules.self_attn_bda is submodules.mlp_bda is layer_features.get_bias_dropout_add


def test_only_norms_after():
    submodules = layer({"norm_placement": "post"})
    assert submodules.input_layernorm is submodules.pre_mlp_layernorm is IdentityOp
    assert submodules.self_attn_bda.params["norm"] is submodules.mlp_bda.params["norm"] is TorchNorm


def test_a_norm_fused_into_a_linear_layer_goes_with_it():
    """As in Transformer Engine's specs, which cannot be built here."""

    class Fused(LocalSpecProvider):
        def column_parallel_linear(self):
            return "without a norm"

    config = settings({"norm_placement": "post", "attn_logit_softcapping": 5.0})
    block = layer_features.add_features(
        layer_specs.decoder_block_spec(settings(), "torch"), config, Fused()
    )
    for spec in block.layer_specs:
        assert spec.submodules.self_attention.submodules.linear_qkv == "without a norm"
        assert spec.submodules.mlp.keywords["submodules"].linear_fc1 == "without a norm"
        assert spec.submodules.self_attention.submodules.core_attention is TorchAttention


@pytest.mark.parametrize(
    ("features", "changes", "message"),
    [
        ({"norm_placement": "after"}, {}, "norm_placement='after'.*pre, post, both"),
        (
            {"qk_norm_across_heads": True},
            {"qk_layernorm": True},
            "qk_norm_across_heads=True.*qk_layernorm",
        ),
        (
            {"qk_norm_across_heads": True},
            {"num_query_groups": 2, "tensor_model_parallel_size": 4},
            "set model.make_query_groups_divisible_by=4",
        ),
    ],
)
def test_refused(features, changes, message):
    with pytest.raises(UserError, match=message):
        layer(features, **changes)
