# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and its successors."""

from tests.families.row import Row

SIZE = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT, LONG = [1.0, 1.1, 1.3, 1.7, 2.2, 3.0], [1.2, 1.5, 2.5, 4.0, 7.0, 9.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": 70.0, "short_factor": SHORT, "long_factor": LONG}
MOE = {
    **{key: value for key, value in SIZE.items() if key != "original_max_position_embeddings"},
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.05,
}

ROWS = [
    Row("phi3", "Phi3ForCausalLM", {**SIZE, "sliding_window": 7}),
    Row(
        "phi3_long_rope_over_part_of_a_head",
        "Phi3ForCausalLM",
        {
            **SIZE,
            "original_max_position_embeddings": 24,  # shorter than the test's sequences: the long factors
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
        },
    ),
    Row(
        "phi3_short_rope",
        "Phi3ForCausalLM",
        {
            **SIZE,
            "max_position_embeddings": 480,
            "original_max_position_embeddings": 48,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
        layouts=("tp2",),
    ),
    Row(
        "phimoe",
        "PhimoeForCausalLM",
        {**MOE, "attention_bias": True, "lm_head_bias": True},
        ("tp2", "sp2", "pp2", "ep2", "etp2"),
    ),
    Row(
        "phimoe_long_rope",
        "PhimoeForCausalLM",
        {
            **MOE,
            "router_jitter_noise": 0.2,
            "sliding_window": 9,
            "max_position_embeddings": 640,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                **LONGROPE,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.7, 2.2, 2.6, 3.0],
                "long_factor": [1.2] * 8,
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 64,
            },
        },
        slow=("tp2",),
    ),
]
