# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B, Nemo and Small: Llama's layers with one window for all of them, or none."""

from megatron.bridge.models.families import *


@register_bridge("MistralForCausalLM", model_type="mistral")
class MistralBridge(DecoderBridge):
    fields = (*DENSE, WINDOW)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    weights = (ends(), attention(), mlp())
