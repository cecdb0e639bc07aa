# SPDX-License-Identifier: Apache-2.0
"""LFM2: short convolutions among attention, feed-forward layers whose width is adjusted."""

from tests.families.row import Row

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
}

ROWS = [
    Row(
        "lfm2",
        "Lfm2ForCausalLM",
        {**SIZES, "layer_types": ["conv", "full_attention", "conv", "conv"]},
        ("tp2", "sp2", "pp2", "vp2"),
    ),
    Row(
        "lfm2_adjusted",
        "Lfm2ForCausalLM",
        {
            **SIZES,
            "intermediate_size": 384,
            "block_auto_adjust_ff_dim": True,
            "conv_L_cache": 4,
            "full_attn_idxs": [0, 3],
            "tie_word_embeddings": False,
        },
        ("pp2",),
    ),
]
