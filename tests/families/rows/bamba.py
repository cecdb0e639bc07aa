# SPDX-License-Identifier: Apache-2.0
"""Bamba: Mamba-2 mixers, whose heads are one group, among attention that rotates half of a head."""

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

ROWS = [
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
