# SPDX-License-Identifier: Apache-2.0
"""The text model of Ministral 3: Mistral's layers, and queries that grow with their position."""

from megatron.bridge.models.families import *


@register_bridge("Ministral3ForCausalLM", model_type="ministral3")
class Ministral3Bridge(DecoderBridge):
    fields = (*override(DENSE, SCALED_QUERY_ROPE), WINDOW)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    weights = (ends(), attention(), mlp())
