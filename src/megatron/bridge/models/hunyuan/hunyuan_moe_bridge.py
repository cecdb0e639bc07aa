# SPDX-License-Identifier: Apache-2.0
"""Hunyuan with experts, A13B: a softmax over the chosen ones, one shared expert."""

from megatron.bridge.models.families import *
from megatron.bridge.models.hunyuan.hunyuan_dense_bridge import HunYuanDenseV1Bridge


@register_bridge("HunYuanMoEV1ForCausalLM", model_type="hunyuan_v1_moe")
class HunYuanMoEV1Bridge(DecoderBridge):
    fields = (
        *override(DENSE, NTK_ALPHA_ROPE),
        ATTENTION_BIAS_OF_EXPERTS,
        *(field for field in expert_sizes(chosen="moe_topk") if field.hf != "moe_intermediate_size"),
        # the width of every expert, and of the shared one
        Field("intermediate_size", ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")),
    )
    fixed = {
        **LLAMA_LIKE,
        **SOFTMAX_ROUTING,
        "moe_router_dtype": "fp32",
        "add_bias_linear": False,
        "qk_layernorm": True,
        "qk_norm_after_rope": True,
    }
    irrelevant = {**HunYuanDenseV1Bridge.irrelevant, "output_router_logits": None, "use_mixed_mlp_moe": (True,)}
    irrelevant |= dict.fromkeys(("moe_intermediate_size", "num_shared_expert"))  # published, and not read
    weights = (
        ends(),
        attention(qk_norm=("query_layernorm", "key_layernorm")),
        router("mlp.gate.wg", norm="post_attention_layernorm"),
        experts(),
        shared_experts("mlp.shared_mlp"),
    )
