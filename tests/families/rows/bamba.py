# SPDX-License-Identifier: Apache-2.0
"""Bamba: Mamba-2 mixers among attention that rotates half of a head. Falcon-H1: mixers beside attention."""

from tests.families.row import Row

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "mamba_n_heads": 8,
    "mamba_d_state": 6,
    "mamba_chunk_size": 16,
}
H1 = {
    **SIZES,
    "intermediate_size": 60,
    "mamba_d_ssm": 64,
    "embedding_multiplier": 1.9,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    "mlp_multipliers": [1.3, 0.6],
    "pad_token_id": 8,  # occurs in the text, and has no gradient as an input
}

ROWS = [
    Row("falcon_h1", "FalconH1ForCausalLM", H1, ("tp2", "sp2", "pp2"), ("tp2pp2",), slow=("vp2",)),
    Row(
        "falcon_h1_groups",
        "FalconH1ForCausalLM",
        {**H1, "mamba_n_groups": 2, "mamba_d_head": 8, "tie_word_embeddings": True},
        slow=("tp2",),
        brief=True,
    ),
    Row(
        "bamba",
        "BambaForCausalLM",
        {**SIZES, "attn_layer_indices": [1]},
        ("sp2",),
        slow=("tp2", "pp2", "vp2"),
        brief=True,
    ),
    Row(
        "bamba_biases",
        "BambaForCausalLM",
        {
            **SIZES,
            "mamba_d_head": 12,
            "attn_layer_indices": [0, 3],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        slow=("tp2",),
        brief=True,
    ),
]
