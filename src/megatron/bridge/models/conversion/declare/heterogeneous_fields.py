# SPDX-License-Identifier: Apache-2.0
"""Layers with a description each: config field, and weights of linear layers that replace a part of a layer."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.conversion.declare.blocks import Block, linear
from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.bridge.utils.errors import UserError


def _each(blocks: list[dict[str, Any]], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    if len(blocks) != config["num_hidden_layers"]:
        raise UserError(f"block_configs has {len(blocks)} layers, num_hidden_layers={config['num_hidden_layers']}")
    return blocks


BLOCK_CONFIGS = Field("block_configs", "block_configs", to=_each)
"""Sizes and kinds of the parts of each layer."""


def linear_replacements(
    layers: str = "model.layers.*", norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
) -> Block:
    """One linear layer in place of attention, or of the feed-forward layer.

    The normalizations before them are named by ``attention`` and ``mlp`` where they are modules of their own.
    """
    ours = "decoder.layers.*"
    parts = (("self_attention", "self_attn.linear_attn", norms[0]), ("mlp", "mlp.linear_mlp", norms[1]))
    return tuple(
        mapping
        for part, theirs, norm in parts
        for mapping in (
            *linear(f"{ours}.{part}", f"{layers}.{theirs}"),
            ReplicatedMapping(f"{ours}.{part}.layer_norm_weight", f"{layers}.{norm}.weight"),
        )
    )
