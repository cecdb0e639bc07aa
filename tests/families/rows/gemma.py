# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 to 3: caps low enough to bend the scores, windows shorter than the text, biases on and off."""

from tests.families.row import Row
from tests.toy_models import LLAMA

_GEMMA = {**LLAMA, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
# another number than the heads' width, windows that end at different places in the text
_GEMMA2 = {**_GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 9}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
_LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0}

ROWS = [
    Row("gemma", "GemmaForCausalLM", {**_GEMMA, "num_key_value_heads": 1}),
    Row("gemma_biases", "GemmaForCausalLM", {**_GEMMA, "attention_bias": True, "tie_word_embeddings": False}),
    Row("gemma2", "Gemma2ForCausalLM", {**_GEMMA2, **_CAPS}, layouts=("tp2", "sp2", "pp2", "vp2"), four=("tp2pp2",)),
    Row("gemma2_biases", "Gemma2ForCausalLM", {**_GEMMA2, "attention_bias": True, "attn_logit_softcapping": None}),
    Row(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            **_GEMMA2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": _LINEAR,
            },
        },
        layouts=("tp2", "sp2", "pp2", "vp2"),
    ),
    Row(
        "gemma3_old_style",
        "Gemma3ForCausalLM",
        {
            **_GEMMA2,
            "sliding_window_pattern": 2,
            "rope_theta": 1000.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            "attention_bias": True,
            "final_logit_softcapping": 1.5,
            "tie_word_embeddings": False,
        },
    ),
]
