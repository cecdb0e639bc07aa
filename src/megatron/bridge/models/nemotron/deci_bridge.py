# SPDX-License-Identifier: Apache-2.0
"""Llama-Nemotron Super and Ultra: Llama whose layers differ in size, or lack attention or feed-forward layer."""

from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.declare.heterogeneous_fields import (
    BLOCK_CONFIGS,
    linear_replacements,
)
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.heterogeneous_provider import HeterogeneousModelProvider

_OF_ALL_LAYERS = ("intermediate_size", "num_key_value_heads")


@register_bridge(
    "DeciLMForCausalLM", provider=HeterogeneousModelProvider, model_type="nemotron-nas"
)
class DeciBridge(DecoderBridge):
    fields = (*(field for field in DENSE if field.hf not in _OF_ALL_LAYERS), BLOCK_CONFIGS)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    irrelevant = {
        **dict.fromkeys(_OF_ALL_LAYERS, (None,)),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    weights = (ends(), attention(), mlp(), linear_replacements())
