# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B, Nemo and Small: Llama's layers with one window for all of them, or none."""

from megatron.bridge.models.families import *


@register_bridge("MistralForCausalLM", model_type="mistral")
class MistralBridge(DecoderBridge):
    fields = (*DENSE, WINDOW)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    weights = (ends(), attention(), mlp())


@register_bridge("MinistralForCausalLM", model_type="ministral")
class MinistralBridge(DecoderBridge):
    """Ministral 8B of 2024: Mistral's layers, a window in those that say so."""

    fields = (*DENSE, *WINDOWS)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    weights = (ends(), attention(), mlp())


@register_bridge("Ministral3ForCausalLM", model_type="ministral3")
class Ministral3Bridge(DecoderBridge):
    """The text model of Ministral 3: Mistral's layers, and queries that grow with their position."""

    fields = (*override(DENSE, SCALED_QUERY_ROPE), WINDOW)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    weights = (ends(), attention(), mlp())
