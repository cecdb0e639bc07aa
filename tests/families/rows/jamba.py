# SPDX-License-Identifier: Apache-2.0
"""Jamba: Mamba-1 mixers, one layer of attention without positions, experts in every other layer."""

from tests.families.row import Row

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 6,
    "mamba_dt_rank": 5,
    "pad_token_id": 8,  # occurs in the text, and has no gradient as an input
}

ROWS = [
    Row(
        "jamba", "JambaForCausalLM", SIZES, ("tp2", "sp2", "pp2", "vp2", "ep2", "etp2"), ("tp2pp2",)
    ),
    Row(
        "jamba_dense",
        "JambaForCausalLM",
        {
            **SIZES,
            "num_experts": 1,
            "mamba_dt_rank": "auto",
            "tie_word_embeddings": True,
            "mamba_expand": 3,
        },
        slow=("tp2",),
        brief=True,
    ),
]
