# SPDX-License-Identifier: Apache-2.0
"""Gated short convolutions between attention layers: config fields and weights."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.conversion.declare.blocks import Block
from megatron.bridge.models.conversion.declare.fields import Field, layers_of_kind
from megatron.bridge.models.conversion.param_mapping import AutoMapping, ReplicatedMapping, ShortConvMapping

_MULTIPLE = 256


def _width(_: Any, config: Mapping[str, Any]) -> int:
    """Return the width of feed-forward layers that transformers derives from four keys."""
    width: int = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    multiple: int = config.get("block_multiple_of", _MULTIPLE)
    factor: float | None = config.get("block_ffn_dim_multiplier")
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _is_adjusted(width: int, _: Any) -> bool:
    return width % _MULTIPLE == 0


def _width_back(width: int, _: Any) -> int:
    return width * 3 // 2 if _is_adjusted(width, None) else width


SHORT_CONV: tuple[Field, ...] = (
    Field("conv_L_cache", "linear_conv_kernel_dim"),
    layers_of_kind("layer_types", "short_conv_layers", ("full_attention", "conv")),
)
"""Layers with a convolution instead of attention, and the convolution's number of tokens."""

ADJUSTED_WIDTH: tuple[Field, ...] = (
    Field("intermediate_size", "ffn_hidden_size", to=_width, back=_width_back),
    Field("block_auto_adjust_ff_dim", "ffn_hidden_size", default=True, to=_width, back=_is_adjusted),
    Field("block_ffn_dim_multiplier", "ffn_hidden_size", default=1.0, to=_width, back=lambda _, __: 1.0),
    Field("block_multiple_of", "ffn_hidden_size", default=_MULTIPLE, to=_width, back=lambda _, __: _MULTIPLE),
)
"""Width of feed-forward layers: 2/3 of the config's value, rounded up to a multiple, unless adjustment is off."""


def short_conv(layers: str = "model.layers.*", norm: str = "operator_norm") -> Block:
    """A gated short convolution; ``attention`` maps the normalization before it if that is a module."""
    ours, theirs = "decoder.layers.*.self_attention", f"{layers}.conv"
    return (
        ShortConvMapping(f"{ours}.in_proj.weight", f"{theirs}.in_proj.weight"),
        ReplicatedMapping(f"{ours}.in_proj.layer_norm_weight", f"{layers}.{norm}.weight"),
        AutoMapping(f"{ours}.conv1d.weight", f"{theirs}.conv.weight"),
        AutoMapping(f"{ours}.out_proj.weight", f"{theirs}.out_proj.weight"),
    )
