# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets between attention layers, and Kimi delta attention between latent ones: fields and weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.bridge.models.conversion.declare.blocks import Block
from megatron.bridge.models.conversion.declare.decoder_fields import ACTIVATION
from megatron.bridge.models.conversion.declare.fields import Field, kind_indices, layers_of_kind
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GDNConv1dMapping,
    GDNLinearMapping,
    HeadRatesMapping,
    ReplicatedMapping,
    SplitGDNLinearMapping,
)
from megatron.bridge.models.features.gated_delta_net import linear_pattern
from megatron.bridge.utils.errors import UserError

_KINDS = ("full_attention", "linear_attention")


def _linear_pattern(kinds: list[str], config: Mapping[str, Any]) -> int | list[int]:
    """Return 1 for each gated delta net, or the period of attention layers if it is regular."""
    pattern = kind_indices("layer_types", kinds, _KINDS, config)
    layers = len(pattern)
    interval = pattern.index(0) + 1 if 0 in pattern else layers + 1
    return (
        interval
        if pattern == [int((layer + 1) % interval != 0) for layer in range(layers)]
        else pattern
    )


def _linear_back(_: Any, provider: Any) -> list[str]:
    return [_KINDS[linear] for linear in linear_pattern(provider)]


def _only_silu(name: Any, config: Mapping[str, Any]) -> Any:
    if name not in ("silu", "swish"):
        raise UserError(
            f"hidden_act={name!r} is not supported: layers without attention have 'silu'"
        )
    assert ACTIVATION.to is not None
    return ACTIVATION.to(name, config)


SILU = replace(ACTIVATION, to=_only_silu)
"""Activation of feed-forward layers and of the convolutions of gated delta nets and Mamba-2 mixers."""

DELTA_NET: tuple[Field, ...] = (
    Field("layer_types", "linear_attention_freq", to=_linear_pattern, back=_linear_back),
    *(
        Field(name, name)
        for name in (
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
        )
    ),
)
"""Layers with a gated delta net, and its sizes."""

KIMI_DELTA: tuple[Field, ...] = (
    SILU,
    layers_of_kind("layer_types", "kda_layers", _KINDS),
    Field("linear_head_dim", ("linear_key_head_dim", "linear_value_head_dim"), default=128),
    Field("linear_num_heads", ("linear_num_key_heads", "linear_num_value_heads"), default=32),
    Field("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
)
"""Layers with Kimi delta attention, and its sizes."""


def delta_net(
    layers: str = "model.layers.*", norm: str = "input_layernorm", split: bool = False
) -> Block:
    """A gated delta net; ``attention`` maps the normalization before it if that is a separate module.

    ``split``: the input projection is four tensors instead of two tensors that are grouped by key head.
    """
    megatron_name = "decoder.layers.*.self_attention"
    hf_name = f"{layers}.linear_attn"
    kind, roles = (
        (SplitGDNLinearMapping, ("qkv", "z", "b", "a"))
        if split
        else (GDNLinearMapping, ("qkvz", "ba"))
    )
    return (
        kind(
            f"{megatron_name}.in_proj.weight",
            **{role: f"{hf_name}.in_proj_{role}.weight" for role in roles},
        ),
        ReplicatedMapping(f"{megatron_name}.in_proj.layer_norm_weight", f"{layers}.{norm}.weight"),
        GDNConv1dMapping(f"{megatron_name}.conv1d.weight", f"{hf_name}.conv1d.weight"),
        AutoMapping(f"{megatron_name}.A_log", f"{hf_name}.A_log"),
        AutoMapping(f"{megatron_name}.dt_bias", f"{hf_name}.dt_bias"),
        ReplicatedMapping(f"{megatron_name}.out_norm.weight", f"{hf_name}.norm.weight"),
        AutoMapping(f"{megatron_name}.out_proj.weight", f"{hf_name}.out_proj.weight"),
    )


def kimi_delta(layers: str = "model.layers.*", names: str = "self_attn") -> Block:
    """Kimi delta attention; ``latent_attention`` maps the normalization before it."""
    megatron_name = "decoder.layers.*.self_attention"
    hf_name = f"{layers}.{names}"
    cut = (
        *(f"{name}_proj" for name in ("q", "k", "v", "b", "f_b", "g_b")),
        *(f"{name}_conv1d" for name in "qkv"),
    )
    return (
        *(AutoMapping(f"{megatron_name}.{name}", f"{hf_name}.{name}.weight") for name in cut),
        *(
            ReplicatedMapping(f"{megatron_name}.{name}", f"{hf_name}.{name}.weight")
            for name in ("f_a_proj", "g_a_proj", "o_norm")
        ),
        AutoMapping(f"{megatron_name}.dt_bias", f"{hf_name}.dt_bias"),
        HeadRatesMapping(f"{megatron_name}.A_log", f"{hf_name}.A_log"),
        AutoMapping(f"{megatron_name}.out_proj.weight", f"{hf_name}.o_proj.weight"),
    )
