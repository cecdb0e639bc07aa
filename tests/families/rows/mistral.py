# SPDX-License-Identifier: Apache-2.0
"""Mistral and its successors."""

from functools import partial

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
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 8,  # occurs in the text, and has no gradient as an input
}
# queries grow at positions 8, 16, 24, ... of the test's 40
YARN = {
    "rope_type": "yarn",
    "rope_theta": 70.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
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
    Row("ministral3", "Ministral3ForCausalLM", {**SIZE, "rope_parameters": YARN}),
    Row(
        "ministral3_tied_window",
        "Ministral3ForCausalLM",
        {**SIZE, "rope_parameters": YARN, "tie_word_embeddings": True, "sliding_window": 7},
        layouts=("tp2", "pp2"),
    ),
    Row(
        "ministral3_fp8_one_scale",
        "Ministral3ForCausalLM",
        {**SIZE, "rope_parameters": YARN},
        layouts=("tp2",),
        rewrite=partial(store_in_fp8, block=None),
    ),
]
