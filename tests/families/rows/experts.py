# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: odd numbers of them, experts that no token chooses, dense layers among the sparse."""

from tests.families.row import Row

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 3,
    "router_aux_loss_coef": 0.0,
}
SIX = {**SIZES, "num_experts": 6, "moe_intermediate_size": 20}
# 40 tokens choose two experts each: some have no token
THIRTY = {**SIX, "num_experts": 30, "num_experts_per_tok": 2}
LAYOUTS = ("tp2", "pp2", "vp2", "ep2", "etp2")

ROWS = [
    Row("mixtral", "MixtralForCausalLM", {**SIZES, "num_local_experts": 6}, LAYOUTS),
    Row(
        "mixtral_window",
        "MixtralForCausalLM",
        {
            **SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
        ("ep2",),
    ),
    Row(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**SIX, "shared_expert_intermediate_size": 28, "decoder_sparse_step": 2, "norm_topk_prob": False},
        LAYOUTS,
    ),
    Row(
        "qwen2_moe_windows",
        "Qwen2MoeForCausalLM",
        {
            **SIX,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        },
        ("ep2",),
    ),
    Row(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**SIX, "norm_topk_prob": True, "mlp_only_layers": [0]},
        LAYOUTS,
        four=("tp2ep2", "tp2pp2"),
    ),
    Row("qwen3_moe_idle_experts", "Qwen3MoeForCausalLM", {**THIRTY, "tie_word_embeddings": True}, ("ep2", "pp2")),
]
