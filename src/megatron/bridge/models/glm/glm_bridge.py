# SPDX-License-Identifier: Apache-2.0
"""GLM-4 9B of 2024: half of each head is rotated, in neighbouring pairs; gate and up projection are one tensor."""

from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, PARTIAL_ROPE
from megatron.bridge.models.conversion.declare.fields import Field, override
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("GlmForCausalLM", model_type="glm")
class GlmBridge(DecoderBridge):
    fields = (*override(DENSE, PARTIAL_ROPE), Field("attention_bias", "add_qkv_bias", default=True))
    fixed = {**LLAMA_LIKE, "rotary_interleaved": True, "add_bias_linear": False}
    weights = (ends(), attention(), mlp(fused=True))
