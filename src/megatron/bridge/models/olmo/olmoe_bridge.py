# SPDX-License-Identifier: Apache-2.0
"""OLMoE: experts in every layer, queries and keys normalised over all heads together."""

from megatron.bridge.models.families import *


@register_bridge("OlmoeForCausalLM", model_type="olmoe")
class OlmoeBridge(DecoderBridge):
    fields = (*(*DENSE, *expert_sizes(width="intermediate_size"), NORM_TOPK, AUX_LOSS), ATTENTION_BIAS_OF_EXPERTS)
    fixed = {**LLAMA_LIKE, **SOFTMAX_ROUTING, "add_bias_linear": False, "qk_norm_across_heads": True}
    irrelevant = {"clip_qkv": (None,), "output_router_logits": None}
    weights = (ends(), attention(qk_norm=True), router(norm="post_attention_layernorm"), experts())


OlMoEBridge = OlmoeBridge
