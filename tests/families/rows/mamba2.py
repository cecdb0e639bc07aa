# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 without attention: groups of several heads, steps with a lower limit."""

from tests.families.row import Row

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_heads": 12,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "conv_kernel": 3,
    "chunk_size": 16,
    "pad_token_id": 8,
}

ROWS = [
    Row("mamba2", "Mamba2ForCausalLM", SIZES, ("sp2",), slow=("tp2", "pp2", "vp2"), brief=True),
    Row(
        "mamba2_tied",
        "Mamba2ForCausalLM",
        {
            **SIZES,
            "tie_word_embeddings": True,
            "time_step_limit": (0.3, float("inf")),
            "residual_in_fp32": False,
        },
        slow=("tp2",),
        brief=True,
    ),
]
