# SPDX-License-Identifier: Apache-2.0
"""Llama decoders: Llama 1 to 3.3, Code Llama, SmolLM2 and others of the same architecture."""

from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import BIASES, DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("LlamaForCausalLM", model_type="llama")
class LlamaBridge(DecoderBridge):
    fields = (*DENSE, *BIASES)
    fixed = LLAMA_LIKE
    weights = (ends(), attention(), mlp())
