# SPDX-License-Identifier: Apache-2.0
"""Attention and MLP side by side: Cohere, Falcon, GPT-NeoX, Phi, StableLM."""

from tests.families.row import Row

# groups of three heads, a vocabulary that divides by nothing
SIZE = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-4,
    "pad_token_id": 8,
}
NEOX = {key: value for key, value in SIZE.items() if key != "num_key_value_heads"}
_RENAMED = {"intermediate_size": "ffn_hidden_size", "layer_norm_eps": "layer_norm_epsilon"}
FALCON = {_RENAMED.get(key, key): value for key, value in NEOX.items()}
PARTIAL = {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 0.25}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
SLOW = ("sp2", "pp2", "vp2")

ROWS = [
    Row(
        "cohere",
        "CohereForCausalLM",
        {**SIZE, "logit_scale": 0.3},
        (),
        slow=("tp2", *SLOW),
        brief=True,
    ),
    Row(
        # groups that two ranks cannot share out evenly
        "cohere_head_norms",
        "CohereForCausalLM",
        {
            **SIZE,
            "num_key_value_heads": 3,
            "use_qk_norm": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        ("tp2",),
        slow=SLOW,
        brief=True,
    ),
    Row(
        "cohere2",
        "Cohere2ForCausalLM",
        {**SIZE, "sliding_window": 7, "layer_types": MIXED, "hidden_act": "gelu"},
        ("pp2",),
        slow=("tp2", "vp2"),
        brief=True,
    ),
    Row("falcon_7b", "FalconForCausalLM", FALCON, ("tp2",), slow=SLOW, brief=True),
    Row(
        "falcon_40b",
        "FalconForCausalLM",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "bias": True,
            "activation": "gelu_new",
        },
        ("pp2",),
        slow=("tp2", "sp2", "vp2"),
        brief=True,
    ),
    Row(
        "falcon_11b",
        "FalconForCausalLM",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 3,
            "tie_word_embeddings": False,
        },
        (),
        slow=("tp2", "pp2"),
        brief=True,
    ),
    Row(
        "falcon_serial",
        "FalconForCausalLM",
        {**FALCON, "parallel_attn": False, "multi_query": False},
        (),
        slow=("tp2", "sp2"),
        brief=True,
    ),
    Row(
        # slopes of a number of heads that is no power of two
        "falcon_rw",
        "FalconForCausalLM",
        {
            **FALCON,
            "alibi": True,
            "bias": True,
            "parallel_attn": False,
            "multi_query": False,
        },
        ("tp2",),
        slow=SLOW,
        brief=True,
        attention="sdpa",
    ),
    Row(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {**NEOX, "rope_parameters": PARTIAL},
        ("tp2",),
        slow=SLOW,
        brief=True,
    ),
    Row(
        "gpt_neox_serial",
        "GPTNeoXForCausalLM",
        {**NEOX, "use_parallel_residual": False, "attention_bias": False, "num_attention_heads": 3},
        (),
        slow=("tp2", "pp2"),
        brief=True,
    ),
    Row(
        "phi",
        "PhiForCausalLM",
        {**SIZE, "rope_parameters": PARTIAL},
        ("tp2",),
        slow=SLOW,
        brief=True,
    ),
    Row(
        "phi_head_norms_tied",
        "PhiForCausalLM",
        {**SIZE, "qk_layernorm": True, "tie_word_embeddings": True},
        (),
        slow=("tp2", "sp2", "pp2"),
        brief=True,
    ),
    Row(
        "stablelm",
        "StableLmForCausalLM",
        {**SIZE, "use_parallel_residual": True, "use_qkv_bias": True},
        (),
        slow=("tp2", "pp2", "vp2"),
        brief=True,
    ),
    Row(
        # three groups, which two ranks cannot share out evenly
        "stablelm_head_norms",
        "StableLmForCausalLM",
        {
            **SIZE,
            "num_key_value_heads": 3,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "rope_parameters": PARTIAL,
        },
        ("tp2",),
        slow=("sp2", "pp2", "vp2"),
        brief=True,
    ),
    Row(
        "stablelm_serial",
        "StableLmForCausalLM",
        {**SIZE, "rope_parameters": PARTIAL},
        (),
        slow=("tp2", "pp2"),
        brief=True,
    ),
]
