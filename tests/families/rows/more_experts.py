# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts whose parts other rows prove in full, each in an awkward shape of its own."""

from tests.families.row import Row

SIZE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 3,
    "pad_token_id": 8,
}
WIDE = {**SIZE, "head_dim": 16}
DEEPSEEK = {
    **WIDE,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "routed_scaling_factor": 2.5,
}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": 7, "layer_types": MIXED}
GRANITE = {
    **SIZE,
    "num_local_experts": 6,
    "embedding_multiplier": 3.3,
    "attention_multiplier": 0.17,
    "residual_multiplier": 0.22,
    "logits_scaling": 7.0,
}
GRANITE_4 = {
    **GRANITE,
    "shared_intermediate_size": 28,
    "position_embedding_type": "nope",
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 10,
}
GRANITE_4_DENSE = {
    **GRANITE_4,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "intermediate_size": 28,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "position_embedding_type": "rope",
    "tie_word_embeddings": True,
}
LLAMA_4 = {
    **WIDE,
    "intermediate_size": 20,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 7,
    "router_aux_loss_coef": 0.0,
}
LLAMA_4_SCALED = {**LLAMA_4, "floor_scale": 6, "attn_scale": 0.7, "use_qk_norm": False}
ERNIE = {
    **{key: value for key, value in WIDE.items() if key != "num_experts_per_tok"},
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 20,
    "moe_norm_min": 0.5,
}
LFM = {
    **{key: value for key, value in SIZE.items() if key != "rms_norm_eps"},
    "norm_eps": 1e-5,
    "num_experts": 6,
    "moe_intermediate_size": 20,
    "num_dense_layers": 1,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
AFMOE = {
    **WIDE,
    **WINDOWS,
    "num_experts": 6,
    "moe_intermediate_size": 20,
    "num_shared_experts": 2,
    "route_scale": 2.5,
}
PARTIAL = {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 0.5}


def row(name, model, config, layouts=(), slow=("tp2", "pp2", "ep2", "etp2"), **more):
    slow = tuple(layout for layout in slow if layout not in layouts)
    return Row(name, model, config, layouts, slow=slow, brief=True, **more)


ROWS = [
    row("granitemoe", "GraniteMoeForCausalLM", {**GRANITE, "tie_word_embeddings": True}, ("ep2",)),
    row(
        "granitemoe_biases",
        "GraniteMoeForCausalLM",
        {**GRANITE, "attention_bias": True, "num_experts_per_tok": 2},
    ),
    row(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        {**GRANITE, "shared_intermediate_size": 28},
    ),
    row("granitemoeshared_none", "GraniteMoeSharedForCausalLM", GRANITE),
    row(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE_4,
        ("sp2", "ep2"),
        slow=("pp2", "etp2"),
    ),
    row(
        "granitemoehybrid_dense",
        "GraniteMoeHybridForCausalLM",
        GRANITE_4_DENSE,
        ("tp2",),
        slow=("pp2",),
    ),
    row("llama4", "Llama4ForCausalLM", LLAMA_4_SCALED, ("tp2", "pp2", "ep2", "etp2")),
    row(
        "llama4_all_sparse",
        "Llama4ForCausalLM",
        {**LLAMA_4, "moe_layers": [0, 1, 2, 3], "attn_temperature_tuning": False},
        slow=("tp2", "pp2", "vp2", "ep2"),
    ),
    row(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        {**WIDE, "num_local_experts": 6, "rope_parameters": PARTIAL},
        ("ep2",),
    ),
    row(
        "minimax_m2_tied",
        "MiniMaxM2ForCausalLM",
        {**WIDE, "num_local_experts": 5, "tie_word_embeddings": True},
        slow=("tp2", "pp2"),
    ),
    row(
        "dots1",
        "Dots1ForCausalLM",
        {
            **DEEPSEEK,
            **WINDOWS,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
    row(
        "dots1_biases",
        "Dots1ForCausalLM",
        {**DEEPSEEK, "n_shared_experts": 1, "attention_bias": True, "norm_topk_prob": True},
    ),
    row("solar_open", "SolarOpenForCausalLM", {**DEEPSEEK, "n_shared_experts": 1}),
    row(
        "solar_open_groups",
        "SolarOpenForCausalLM",
        {
            **DEEPSEEK,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
        },
    ),
    row(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        {**SIZE, **WINDOWS, "num_experts": 6, "moe_intermediate_size": 20, "num_shared_experts": 2},
    ),
    row("ernie45_moe", "Ernie4_5_MoeForCausalLM", {**ERNIE, "moe_num_shared_experts": 2}, ("ep2",)),
    row(
        "ernie45_moe_between",
        "Ernie4_5_MoeForCausalLM",
        {
            **ERNIE,
            "moe_num_shared_experts": 0,
            "moe_layer_end_index": 2,
            "tie_word_embeddings": False,
        },
    ),
    row("lfm2_moe", "Lfm2MoeForCausalLM", LFM, ("ep2",)),
    row(
        "lfm2_moe_plain_routing",
        "Lfm2MoeForCausalLM",
        {
            **LFM,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": False,
        },
    ),
    row("flex_olmo", "FlexOlmoForCausalLM", {**SIZE, "num_experts": 6}),
    row(
        "flex_olmo_normalised",
        "FlexOlmoForCausalLM",
        {**SIZE, "num_experts": 5, "norm_topk_prob": True, "attention_bias": False},
        slow=("tp2", "pp2"),
    ),
    row("afmoe", "AfmoeForCausalLM", AFMOE, ("ep2",)),
    row(
        "afmoe_mup",
        "AfmoeForCausalLM",
        {
            **AFMOE,
            "mup_enabled": True,
            "tie_word_embeddings": True,
            "num_shared_experts": 1,
            "num_dense_layers": 2,
        },
    ),
    row(
        "hunyuan_moe",
        "HunYuanMoEV1ForCausalLM",
        {
            **{k: v for k, v in WIDE.items() if k != "num_experts_per_tok"},
            "num_experts": 6,
            "moe_topk": 3,
        },
        ("ep2",),
    ),
]
