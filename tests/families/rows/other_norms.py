# SPDX-License-Identifier: Apache-2.0
"""Families with norms, rotary embeddings or multipliers that Llama has not: GLM, Nemotron, OLMo 2, Granite."""

from tests.families.row import Row
from tests.toy_models import LLAMA

_PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
_GLM = {**LLAMA, "pad_token_id": 8}
_GRANITE = {
    "embedding_multiplier": 3.3,
    "attention_multiplier": 0.17,
    "residual_multiplier": 0.22,
    "logits_scaling": 7.0,
}
_NEMOTRON = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"} | {
    "hidden_act": "relu2"
}

ROWS = [
    Row("glm", "GlmForCausalLM", {**_GLM, "rope_parameters": _PARTIAL}),
    Row(
        "glm_whole_heads",  # not the default of a half
        "GlmForCausalLM",
        {
            **_GLM,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 1.0},
        },
    ),
    Row(
        "glm4",
        "Glm4ForCausalLM",
        {**_GLM, "rope_parameters": _PARTIAL},
        layouts=("tp2", "sp2", "pp2", "vp2"),
    ),
    Row("nemotron", "NemotronForCausalLM", {**_NEMOTRON, "rope_parameters": _PARTIAL}),
    Row(
        "nemotron_biases",
        "NemotronForCausalLM",
        {
            **_NEMOTRON,
            "attention_bias": True,
            "mlp_bias": True,
            "partial_rotary_factor": 0.25,
            "rope_theta": 50.0,
        },
    ),
    Row(
        "olmo_clipped",
        "OlmoForCausalLM",
        {
            **{key: value for key, value in LLAMA.items() if key != "rms_norm_eps"},
            "attention_bias": True,
            "clip_qkv": 0.5,
        },
        layouts=("tp2",),
        slow=("sp2", "pp2"),
        brief=True,
    ),
    Row(
        "olmo2",
        "Olmo2ForCausalLM",
        {**LLAMA, "num_key_value_heads": None},
        layouts=("tp2", "sp2", "pp2", "vp2"),
    ),
    # one key head: under tensor parallelism there are heads of padding, which no norm may count
    Row(
        "olmo2_groups",
        "Olmo2ForCausalLM",
        {**LLAMA, "num_key_value_heads": 1, "attention_bias": True},
    ),
    Row("granite", "GraniteForCausalLM", {**LLAMA, **_GRANITE, "tie_word_embeddings": True}),
    Row(
        "granite_biases",
        "GraniteForCausalLM",
        {**LLAMA, **_GRANITE, "attention_bias": True, "mlp_bias": True},
    ),
]
