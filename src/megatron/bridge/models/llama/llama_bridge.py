# SPDX-License-Identifier: Apache-2.0
"""Llama decoders: Llama 1 to 3.3, Code Llama, SmolLM2 and others of the same architecture."""

from megatron.bridge.models.families import *


@register_bridge("LlamaForCausalLM", model_type="llama")
class LlamaBridge(DecoderBridge):
    fields = (*DENSE, *BIASES)
    fixed = LLAMA_LIKE
    weights = (ends(), attention(), mlp())
