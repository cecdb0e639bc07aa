# SPDX-License-Identifier: Apache-2.0
"""Llama-Nemotron Super and Ultra: Llama whose layers differ in size, or lack attention or feed-forward layer."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.conversion.blocks import attention, ends, linear, mlp
from megatron.bridge.models.conversion.decoder_fields import DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.fields import Field
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.bridge.models.heterogeneous_provider import HeterogeneousModelProvider
from megatron.bridge.utils.errors import UserError

_OF_ALL_LAYERS = ("intermediate_size", "num_key_value_heads")
_OURS, _THEIRS = "decoder.layers.*", "model.layers.*"


def _each(blocks: list[dict[str, Any]], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    if len(blocks) != config["num_hidden_layers"]:
        raise UserError(f"block_configs has {len(blocks)} layers, num_hidden_layers={config['num_hidden_layers']}")
    return blocks


@register_bridge("DeciLMForCausalLM", provider=HeterogeneousModelProvider, model_type="nemotron-nas")
class DeciBridge(DecoderBridge):
    """The hub's remote-code ``DeciLMForCausalLM`` and Megatron's ``GPTModel``."""

    fields = (
        *(field for field in DENSE if field.hf not in _OF_ALL_LAYERS),
        Field("block_configs", "block_configs", to=_each),
    )
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    irrelevant = {
        **dict.fromkeys(_OF_ALL_LAYERS, (None,)),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    weights = (
        ends(),
        attention(),
        mlp(),
        # one linear layer in place of attention, or of the feed-forward layer
        linear(f"{_OURS}.self_attention", f"{_THEIRS}.self_attn.linear_attn"),
        linear(f"{_OURS}.mlp", f"{_THEIRS}.mlp.linear_mlp"),
        (
            ReplicatedMapping(f"{_OURS}.self_attention.layer_norm_weight", f"{_THEIRS}.input_layernorm.weight"),
            ReplicatedMapping(f"{_OURS}.mlp.layer_norm_weight", f"{_THEIRS}.post_attention_layernorm.weight"),
        ),
    )
