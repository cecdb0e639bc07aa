# SPDX-License-Identifier: Apache-2.0
"""Multipliers of layers with a Mamba-2 mixer in parallel with attention (Falcon-H1), and unsupported settings."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from megatron.bridge.backends.recurrent.one_group_mamba import AttentionBesideMamba
from megatron.bridge.models.features import gated_delta_net
from megatron.bridge.utils.errors import UserError, did_you_mean

_FIELD = "mamba_beside_attention"

MULTIPLIERS: dict[str, Any] = {
    "attention_in_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5,  # of the gate, x, B, C and dt
    "ssm_out_multiplier": 1.0,
    "mlp_multipliers": [1.0] * 2,  # of the gate and of the output
}
"""The keys of ``mamba_beside_attention``, which are transformers', with the values that change nothing."""

_EXCLUDED: dict[str, Any] = {
    "context_parallel_size": 1,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "num_moe_experts": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "parallel_residual": None,
    "norm_placement": "pre",
    "experimental_attention_variant": None,
    **dict.fromkeys(gated_delta_net.LAYERS),
}


def derive(config: Any) -> None:
    """Refuse unsupported settings; the multiplier of queries and keys becomes part of the attention scale."""
    if config.mamba_beside_attention is None:
        return
    for name in config.mamba_beside_attention:
        if name not in MULTIPLIERS:
            raise UserError(
                f"mamba_beside_attention has no multiplier {name}{did_you_mean(name, MULTIPLIERS)}"
            )
    gated_delta_net.exclude(config, _EXCLUDED, f"with {_FIELD}")
    _check_sizes(config)
    factors = {**MULTIPLIERS, **config.mamba_beside_attention}
    if config.softmax_scale is None:
        width = config.kv_channels or config.hidden_size // config.num_attention_heads
        config.softmax_scale = (
            factors["attention_in_multiplier"] ** 2 * factors["key_multiplier"] * width**-0.5
        )


def _check_sizes(config: Any) -> None:
    groups = config.mamba_num_groups
    if (config.mamba_num_heads or 0) % groups:
        raise UserError(
            f"mamba_num_groups={groups} does not divide mamba_num_heads={config.mamba_num_heads}"
        )
    names = ("mamba_num_heads", "mamba_state_dim" if groups == 1 else "mamba_num_groups")
    gated_delta_net.check_split(config, names, _FIELD)


def apply(model: nn.Module, config: Any) -> None:
    """Give the layers of ``model`` (a ``GPTModel``) their multipliers."""
    if config.mamba_beside_attention is None:
        return
    factors = {**MULTIPLIERS, **config.mamba_beside_attention}
    gate, down = factors["mlp_multipliers"]
    for module in model.modules():
        if isinstance(module, AttentionBesideMamba):
            attention = factors["attention_in_multiplier"] * factors["attention_out_multiplier"]
            module.multipliers = (attention, factors["ssm_out_multiplier"])
            mixer: Any = module.mixer
            states = mixer.ngroups_local_tp * mixer.d_state
            sizes = (
                mixer.d_inner_local_tp,
                mixer.d_inner_local_tp,
                states,
                states,
                mixer.nheads_local_tp,
            )
            section_factors = [
                factors["ssm_in_multiplier"] * factor for factor in factors["ssm_multipliers"]
            ]
            mixer.in_proj.register_forward_hook(partial(_multiply_outputs, section_factors, sizes))
        elif isinstance(module, MLP):
            width = config.ffn_hidden_size // config.tensor_model_parallel_size
            module.get_submodule("linear_fc1").register_forward_hook(
                partial(_multiply_outputs, (gate, 1.0), (width, width))
            )
            module.get_submodule("linear_fc2").register_forward_hook(
                partial(_multiply_outputs, (down,), (config.hidden_size,))
            )


def _multiply_outputs(
    factors: Sequence[float],
    sizes: Sequence[int],
    _module: nn.Module,
    _inputs: Any,
    outputs: tuple[Tensor, Any],
) -> tuple[Tensor, Any]:
    """Multiply parts of a linear layer's concatenated outputs."""
    out, bias = outputs
    parts = [out.new_full((size,), factor) for factor, size in zip(factors, sizes, strict=True)]
    return out * torch.cat(parts), bias
