# SPDX-License-Identifier: Apache-2.0
"""Helium: Llama with rotated pairs of neighbours."""

from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, PART_BIASES
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("HeliumForCausalLM", model_type="helium")
class HeliumBridge(DecoderBridge):
    fields = (*DENSE, *(field for field in PART_BIASES if field.hf != "attention_out_bias"))
    fixed = {**LLAMA_LIKE, "rotary_interleaved": True}
    weights = (ends(), attention(), mlp())
