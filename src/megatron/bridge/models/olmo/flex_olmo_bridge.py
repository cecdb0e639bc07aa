# SPDX-License-Identifier: Apache-2.0
"""FlexOlmo: OLMo 2's attention and norms, OLMoE's experts."""

from megatron.bridge.models.families import *


@register_bridge("FlexOlmoForCausalLM", model_type="flex_olmo")
class FlexOlmoBridge(DecoderBridge):
    fields = (*DENSE, *expert_sizes(width="intermediate_size"), NORM_TOPK, AUX_LOSS, ATTENTION_BIAS_OF_EXPERTS)
    fixed = {
        **LLAMA_LIKE,
        **SOFTMAX_ROUTING,
        "add_bias_linear": False,
        "norm_placement": "post",
        "qk_norm_across_heads": True,
    }
    irrelevant = {"output_router_logits": None}
    weights = (
        ends(),
        attention(norm=None, qk_norm=True),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
        router(),
        experts(),
    )
