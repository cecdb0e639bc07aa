# SPDX-License-Identifier: Apache-2.0
"""OLMoE: experts in every layer, queries and keys normalised over all heads together."""

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("OlmoeForCausalLM", model_type="olmoe")
class OlmoeBridge(DecoderBridge):
    fields = (
        *(*DENSE, *moe.expert_sizes(width="intermediate_size"), moe.NORM_TOPK, moe.AUX_LOSS),
        moe.ATTENTION_BIAS_OF_EXPERTS,
    )
    fixed = {**LLAMA_LIKE, **moe.SOFTMAX_ROUTING, "add_bias_linear": False, "qk_norm_across_heads": True}
    irrelevant = {"clip_qkv": (None,), "output_router_logits": None}
    weights = (ends(), attention(qk_norm=True), router(norm="post_attention_layernorm"), experts())


OlMoEBridge = OlmoeBridge
