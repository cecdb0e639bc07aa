# SPDX-License-Identifier: Apache-2.0
"""GLM-4 9B of 2024: half of each head is rotated, in neighbouring pairs; gate and up projection are one tensor."""

from megatron.bridge.models.families import *


@register_bridge("GlmForCausalLM", model_type="glm")
class GlmBridge(DecoderBridge):
    fields = (*override(DENSE, PARTIAL_ROPE), Field("attention_bias", "add_qkv_bias", default=True))
    fixed = {**LLAMA_LIKE, "rotary_interleaved": True, "add_bias_linear": False}
    weights = (ends(), attention(), mlp(fused=True))


@register_bridge("Glm4ForCausalLM", model_type="glm4")
class Glm4Bridge(GlmBridge):
    """GLM-4-0414, 9B and 32B: GLM with norms after attention and MLP as well."""

    fixed = {**GlmBridge.fixed, "norm_placement": "both"}
    weights = (*GlmBridge.weights, post_norms("post_self_attn_layernorm", "post_mlp_layernorm"))
