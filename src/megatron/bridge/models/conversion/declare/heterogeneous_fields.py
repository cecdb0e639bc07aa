# SPDX-License-Identifier: Apache-2.0
"""Models that describe each layer separately: config field, and linear layers that replace a part of a layer."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.conversion.declare.blocks import Block, linear
from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.bridge.utils.errors import UserError


def _one_block_a_layer(
    blocks: list[dict[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    if len(blocks) != config["num_hidden_layers"]:
        raise UserError(
            f"block_configs has {len(blocks)} layers, num_hidden_layers={config['num_hidden_layers']}"
        )
    return blocks


BLOCK_CONFIGS = Field("block_configs", "block_configs", to=_one_block_a_layer)
"""Description of each layer: sizes and kinds of its parts."""


def linear_replacements(
    layers: str = "model.layers.*",
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
) -> Block:
    """A linear layer that replaces attention, and one that replaces the feed-forward layer.

    ``attention`` and ``mlp`` map the normalizations before them if these are separate modules.
    """
    megatron_layers = "decoder.layers.*"
    parts = (
        ("self_attention", "self_attn.linear_attn", norms[0]),
        ("mlp", "mlp.linear_mlp", norms[1]),
    )
    return tuple(
        mapping
        for part, hf_name, norm in parts
        for mapping in (
            *linear(f"{megatron_layers}.{part}", f"{layers}.{hf_name}"),
            ReplicatedMapping(
                f"{megatron_layers}.{part}.layer_norm_weight", f"{layers}.{norm}.weight"
            ),
        )
    )
