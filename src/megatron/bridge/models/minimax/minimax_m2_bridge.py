# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2: sigmoid routing in every layer, queries and keys normed over all heads together."""

from megatron.bridge.models.families import (
    AUX_LOSS,
    DENSE,
    LLAMA_LIKE,
    PARTIAL_ROPE,
    SIGMOID_ROUTING,
    DecoderBridge,
    attention,
    ends,
    expert_sizes,
    experts,
    override,
    register_bridge,
    router,
)


@register_bridge("MiniMaxM2ForCausalLM", model_type="minimax_m2")
class MiniMaxM2Bridge(DecoderBridge):
    fields = (
        *override(DENSE, PARTIAL_ROPE),
        *expert_sizes("num_local_experts", "intermediate_size"),
        AUX_LOSS,
    )
    fixed = {
        **LLAMA_LIKE,
        **SIGMOID_ROUTING,
        "add_bias_linear": False,
        "qk_norm_across_heads": True,
    }
    irrelevant = {
        "router_jitter_noise": (0.0,),
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
        # of layers that transformers does not have, or does not read: attention is full in every layer
        **dict.fromkeys(
            ("attn_type_list", "rotary_dim", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
        ),
    }
    weights = (
        ends(),
        attention(qk_norm=True),
        router(
            "block_sparse_moe.gate",
            norm="post_attention_layernorm",
            correction_in="block_sparse_moe",
        ),
        experts("block_sparse_moe.experts.*", gate="w1", up="w3", down="w2"),
    )
