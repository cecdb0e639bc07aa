# SPDX-License-Identifier: Apache-2.0
"""Arcee's Trinity: gated attention with windows, norms before and after each part, sigmoid routing."""

from dataclasses import replace

from megatron.bridge.models.families import (
    DENSE,
    LLAMA_LIKE,
    SCALING,
    SHARED_EXPERTS,
    SIGMOID_ROUTING,
    WINDOW,
    WINDOWED_ROPE,
    DecoderBridge,
    attention,
    dense_before_sparse,
    ends,
    expert_sizes,
    experts,
    mlp,
    named,
    post_norms,
    register_bridge,
    router,
    shared_experts,
)


@register_bridge("AfmoeForCausalLM", model_type="afmoe")
class AfmoeBridge(DecoderBridge):
    fields = (
        *DENSE,
        WINDOW,
        WINDOWED_ROPE,
        *expert_sizes(),
        replace(SHARED_EXPERTS, hf="num_shared_experts"),
        replace(SCALING, hf="route_scale"),
        dense_before_sparse("num_dense_layers"),
        named(
            "mup_enabled",
            "embedding_multiplier",
            {True: "sqrt_hidden_size", False: 1.0},
            default=False,
        ),
    )
    fixed = {
        **LLAMA_LIKE,
        **SIGMOID_ROUTING,
        "add_bias_linear": False,
        "norm_placement": "both",
        "qk_layernorm": True,
        "attention_output_gate": True,
    }
    irrelevant = {
        "attention_bias": (False,),
        "global_attn_every_n_layers": None,  # it stands in for layer_types, which transformers always fills in
        "score_func": ("sigmoid",),
        "route_norm": (True,),
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1,)),
        **dict.fromkeys(("load_balance_coeff", "use_grouped_mm")),
    }
    weights = (
        ends(),
        attention(qk_norm=True, gated="gate_proj"),
        mlp(norm="pre_mlp_layernorm"),
        post_norms("post_attention_layernorm", "post_mlp_layernorm"),
        router("mlp.router.gate", "expert_bias", correction_in="mlp"),
        experts(),
        shared_experts(),
    )
