# SPDX-License-Identifier: Apache-2.0
"""The text model of Ministral 3: Mistral's layers, and queries that grow with their position."""

from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, SCALED_QUERY_ROPE, WINDOW
from megatron.bridge.models.conversion.declare.fields import override
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("Ministral3ForCausalLM", model_type="ministral3")
class Ministral3Bridge(DecoderBridge):
    fields = (*override(DENSE, SCALED_QUERY_ROPE), WINDOW)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    weights = (ends(), attention(), mlp())
