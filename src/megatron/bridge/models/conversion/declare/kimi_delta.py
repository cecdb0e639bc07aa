# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention among layers of latent attention: config fields and weights."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.conversion.declare.blocks import Block
from megatron.bridge.models.conversion.declare.fields import Field, kind_indices
from megatron.bridge.models.conversion.declare.gated_delta_net import SILU
from megatron.bridge.models.conversion.param_mapping import AutoMapping, HeadRatesMapping, ReplicatedMapping

_KINDS = ("full_attention", "linear_attention")


def _delta_layers(kinds: list[str], config: Mapping[str, Any]) -> list[int]:
    return kind_indices("layer_types", kinds, _KINDS, config)


KIMI_DELTA: tuple[Field, ...] = (
    SILU,
    Field("layer_types", "kda_layers", to=_delta_layers, back=lambda layers, _: [_KINDS[layer] for layer in layers]),
    Field("linear_head_dim", ("linear_key_head_dim", "linear_value_head_dim"), default=128),
    Field("linear_num_heads", ("linear_num_key_heads", "linear_num_value_heads"), default=32),
    Field("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
)
"""Which layers have Kimi delta attention, and its sizes."""


def kimi_delta(layers: str = "model.layers.*", names: str = "self_attn") -> Block:
    """Kimi delta attention; the normalisation before it is named by ``latent_attention``.

    Args:
        layers: Hugging Face's name of a layer.
        names: its name of attention of either kind in a layer.
    """
    ours, theirs = "decoder.layers.*.self_attention", f"{layers}.{names}"
    cut = (*(f"{name}_proj" for name in ("q", "k", "v", "b", "f_b", "g_b")), *(f"{name}_conv1d" for name in "qkv"))
    return (
        *(AutoMapping(f"{ours}.{name}", f"{theirs}.{name}.weight") for name in cut),
        *(
            ReplicatedMapping(f"{ours}.{name}", f"{theirs}.{name}.weight")
            for name in ("f_a_proj", "g_a_proj", "o_norm")
        ),
        AutoMapping(f"{ours}.dt_bias", f"{theirs}.dt_bias"),
        HeadRatesMapping(f"{ours}.A_log", f"{theirs}.A_log"),
        AutoMapping(f"{ours}.out_proj.weight", f"{theirs}.o_proj.weight"),
    )
