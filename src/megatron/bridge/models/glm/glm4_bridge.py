# SPDX-License-Identifier: Apache-2.0
"""GLM-4-0414, 9B and 32B: GLM with norms after attention and MLP as well."""

from megatron.bridge.models.families import *
from megatron.bridge.models.glm.glm_bridge import GlmBridge


@register_bridge("Glm4ForCausalLM", model_type="glm4")
class Glm4Bridge(GlmBridge):
    fixed = {**GlmBridge.fixed, "norm_placement": "both"}
    weights = (*GlmBridge.weights, post_norms("post_self_attn_layernorm", "post_mlp_layernorm"))
