# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen3 dense decoders, and what is made of their layers."""

from tests.families.row import Row
from tests.quantize import store_in_fp8

# head width is not hidden / heads, the vocabulary divides by nothing, groups of three heads
SIZE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
QWEN3 = {**SIZE, "head_dim": 16}
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 70.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]

ROWS = [
    Row("qwen2", "Qwen2ForCausalLM", SIZE, four=("tp2pp2",)),
    Row(
        "qwen2_tied_windows",
        "Qwen2ForCausalLM",
        {
            **SIZE,
            **WINDOWED,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 70.0},
        },
    ),
    Row("qwen3", "Qwen3ForCausalLM", QWEN3),
    Row(
        "qwen3_tied_biases_windows",
        "Qwen3ForCausalLM",
        {
            **QWEN3,
            **WINDOWED,
            "layer_types": MIXED,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Row("mimo", "MiMoForCausalLM", {**QWEN3, "num_nextn_predict_layers": 1}, brief=True),
    Row("qwen3_fp8", "Qwen3ForCausalLM", QWEN3, layouts=("tp2", "pp2"), rewrite=store_in_fp8),
]
