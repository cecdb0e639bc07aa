# SPDX-License-Identifier: Apache-2.0
"""Kimi-Linear: delta nets that decay each channel by itself, latent attention without positions, sigmoid routing."""

from tests.families.row import Row

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 12,
    "v_head_dim": 14,
    "num_local_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 64,
    "linear_head_dim": 7,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "pad_token_id": 8,  # occurs in the text, and has no gradient as an input
}

ROWS = [
    Row(
        "kimi_linear",
        "KimiLinearForCausalLM",
        SIZES,
        ("tp2", "sp2", "pp2", "vp2", "ep2", "etp2"),
        ("tp2pp2",),
    )
]
