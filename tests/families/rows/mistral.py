# SPDX-License-Identifier: Apache-2.0
"""Mistral and its successors."""

from tests.families.row import Row

# head width is not hidden / heads, the vocabulary divides by nothing, groups of three heads
SIZE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]

ROWS = [
    Row("mistral_window", "MistralForCausalLM", {**SIZE, "sliding_window": 7}),
    Row(
        "mistral_tied",
        "MistralForCausalLM",
        {**SIZE, "sliding_window": None, "tie_word_embeddings": True, "num_key_value_heads": 6},
        layouts=("tp2",),
    ),
    Row("ministral", "MinistralForCausalLM", {**SIZE, "sliding_window": 7, "layer_types": MIXED}),
]
