# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 to 4: caps low enough to bend the scores, windows shorter than the text, biases on and off."""

from tests.families.row import Row
from tests.toy_models import LLAMA

_GEMMA = {**LLAMA, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
# another number than the heads' width, windows that end at different places in the text
_GEMMA2 = {**_GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 9}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
_LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0}

_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
# layers without a window have wider heads; the last layers have no keys, or the full ones no values
_GEMMA4 = {
    **_GEMMA,
    "pad_token_id": 8,
    "sliding_window": 9,
    **_FOUR_LAYERS,
    "head_dim": 8,  # scores have no scale of their own: wide heads would make rounding errors grow
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000.0,
        },
    },
}
_PER_LAYER = {
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 101,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
_KEYS_ARE_VALUES = {
    "attention_k_eq_v": True,
    "num_key_value_heads": 6,
    "num_global_key_value_heads": 2,
}
_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 20,
}

ROWS = [
    Row("gemma4", "Gemma4ForCausalLM", {**_GEMMA4, **_PER_LAYER}, ("tp2", "sp2")),
    Row(
        "gemma4_keys_are_values",
        "Gemma4ForCausalLM",
        {**_GEMMA4, **_KEYS_ARE_VALUES, "final_logit_softcapping": 1.5},
        ("tp2", "sp2", "pp2", "vp2"),
    ),
    Row(
        "gemma4_experts",
        "Gemma4ForCausalLM",
        {**_GEMMA4, **_KEYS_ARE_VALUES, **_EXPERTS, "tie_word_embeddings": False},
        ("sp2", "pp2", "ep2", "etp2"),
    ),
    Row(
        "gemma4_biases",
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            **_PER_LAYER,
            **_KEYS_ARE_VALUES,
            "attention_bias": True,
            "vocab_size_per_layer_input": 105,
        },
        ("tp2",),
        brief=True,
    ),
    Row(
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        {
            **{key: value for key, value in _GEMMA4.items() if "per_layer" not in key},
            **_KEYS_ARE_VALUES,
            "num_global_key_value_heads": 1,
        },
        ("tp2", "pp2"),
        brief=True,
        provider={"make_query_groups_divisible_by": 1},
    ),
    Row(
        "gemma4_one_key",
        "Gemma4ForCausalLM",
        {**_GEMMA4, **_PER_LAYER, **_FOUR_LAYERS, "num_key_value_heads": 1},
        ("tp2",),
        brief=True,
        provider={"make_query_groups_divisible_by": 1},
    ),
    Row("gemma", "GemmaForCausalLM", {**_GEMMA, "num_key_value_heads": 1}),
    Row(
        "gemma_biases",
        "GemmaForCausalLM",
        {**_GEMMA, "attention_bias": True, "tie_word_embeddings": False},
    ),
    Row(
        "gemma2",
        "Gemma2ForCausalLM",
        {**_GEMMA2, **_CAPS},
        layouts=("tp2", "sp2", "pp2", "vp2"),
        four=("tp2pp2",),
    ),
    Row(
        "gemma2_biases",
        "Gemma2ForCausalLM",
        {**_GEMMA2, "attention_bias": True, "attn_logit_softcapping": None},
    ),
    Row(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            **_GEMMA2,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
            ],
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
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "attention_bias": True,
            "final_logit_softcapping": 1.5,
            "tie_word_embeddings": False,
        },
    ),
]
