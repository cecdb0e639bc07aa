# SPDX-License-Identifier: Apache-2.0
"""Ministral 8B of 2024: Mistral's layers, a window in those that say so."""

from megatron.bridge.models.families import *


@register_bridge("MinistralForCausalLM", model_type="ministral")
class MinistralBridge(DecoderBridge):
    fields = (*DENSE, *WINDOWS)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    weights = (ends(), attention(), mlp())
