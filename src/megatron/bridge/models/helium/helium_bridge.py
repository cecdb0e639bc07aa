# SPDX-License-Identifier: Apache-2.0
"""Helium: Llama with rotated pairs of neighbors."""

from megatron.bridge.models.families import (
    DENSE,
    LLAMA_LIKE,
    PART_BIASES,
    DecoderBridge,
    attention,
    ends,
    mlp,
    register_bridge,
)


@register_bridge("HeliumForCausalLM", model_type="helium")
class HeliumBridge(DecoderBridge):
    fields = (*DENSE, *(field for field in PART_BIASES if field.hf != "attention_out_bias"))
    fixed = {**LLAMA_LIKE, "rotary_interleaved": True}
    weights = (ends(), attention(), mlp())
