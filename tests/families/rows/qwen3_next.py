# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: gated delta nets among gated attention, value heads in groups, a quarter of each head rotated."""

from tests.families.row import Row
from tests.families.rows.experts import LAYOUTS, SIX

SIZES = {
    **SIX,
    "shared_expert_intermediate_size": 28,
    # what a state recalls is small, and its norm would make noise of float32 grow, in transformers as well
    "rms_norm_eps": 1e-2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}

ROWS = [
    Row(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**SIZES, "full_attention_interval": 2},
        LAYOUTS,
        four=("tp2ep2",),
    ),
    Row(
        "qwen3_next_irregular",
        "Qwen3NextForCausalLM",
        {
            **SIZES,
            "layer_types": [
                "full_attention",
                "linear_attention",
                "linear_attention",
                "linear_attention",
            ],
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
            },
        },
        ("pp2", "tp2"),
    ),
]
