# SPDX-License-Identifier: Apache-2.0
"""Hunyuan, dense, 0.5B to 7B: Llama with queries and keys normed behind the rotary embedding."""

from megatron.bridge.models.families import (
    ATTENTION_BIAS,
    ATTENTION_BIAS_OF_EXPERTS,
    DENSE,
    LLAMA_LIKE,
    NTK_ALPHA_ROPE,
    SOFTMAX_ROUTING,
    DecoderBridge,
    Field,
    attention,
    ends,
    expert_sizes,
    experts,
    mlp,
    override,
    register_bridge,
    router,
    shared_experts,
)

_TOKENS = ("eod_token", "im_start", "im_end", "im_newline", "text_start", "text_end", "mask_init")


@register_bridge("HunYuanDenseV1ForCausalLM", model_type="hunyuan_v1_dense")
class HunYuanDenseV1Bridge(DecoderBridge):
    fields = (*override(DENSE, NTK_ALPHA_ROPE), ATTENTION_BIAS)
    fixed = {**LLAMA_LIKE, "mlp_bias": False, "qk_layernorm": True, "qk_norm_after_rope": True}
    # copies, other names and token ids in published configs; transformers reads none of them
    irrelevant = {
        **dict.fromkeys(f"{name}_id" for name in _TOKENS),
        **dict.fromkeys(
            ("attention_head_dim", "org_vocab_size", "add_classification_head", "class_num")
        ),
        **dict.fromkeys(("pool_type", "dense_list", "norm_type")),
        "use_qk_norm": (True,),
        "use_cla": (False,),
        "mlp_bias": (False,),
        "use_rotary_pos_emb": (True,),
    }
    weights = (ends(), attention(qk_norm=("query_layernorm", "key_layernorm")), mlp())


@register_bridge("HunYuanMoEV1ForCausalLM", model_type="hunyuan_v1_moe")
class HunYuanMoEV1Bridge(DecoderBridge):
    """Hunyuan with experts, A13B: a softmax over the chosen ones, one shared expert."""

    fields = (
        *override(DENSE, NTK_ALPHA_ROPE),
        ATTENTION_BIAS_OF_EXPERTS,
        *(
            field
            for field in expert_sizes(chosen="moe_topk")
            if field.hf != "moe_intermediate_size"
        ),
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
    irrelevant = {**HunYuanDenseV1Bridge.irrelevant, "use_mixed_mlp_moe": (True,)}
    irrelevant |= dict.fromkeys(
        ("moe_intermediate_size", "num_shared_expert")
    )  # published, and not read
    weights = (
        ends(),
        attention(qk_norm=("query_layernorm", "key_layernorm")),
        router("mlp.gate.wg", norm="post_attention_layernorm"),
        experts(),
        shared_experts("mlp.shared_mlp"),
    )
