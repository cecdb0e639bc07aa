# SPDX-License-Identifier: Apache-2.0
"""FlexOlmo: OLMo 2's attention and norms, OLMoE's experts."""

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends, post_norms
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("FlexOlmoForCausalLM", model_type="flex_olmo")
class FlexOlmoBridge(DecoderBridge):
    fields = (
        *DENSE,
        *moe.expert_sizes(width="intermediate_size"),
        moe.NORM_TOPK,
        moe.AUX_LOSS,
        moe.ATTENTION_BIAS_OF_EXPERTS,
    )
    fixed = {
        **LLAMA_LIKE,
        **moe.SOFTMAX_ROUTING,
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
