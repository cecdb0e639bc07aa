# SPDX-License-Identifier: Apache-2.0
"""Decoders that differ from Llama in what is declared: StarCoder2, Seed-OSS, EXAONE 4, ERNIE 4.5 and others."""

from tests.families.row import Row

SIZE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 8,
}
WIDE = {**SIZE, "head_dim": 16}
STARCODER = {key: value for key, value in SIZE.items() if key != "rms_norm_eps"}
SEED = {**WIDE, "attention_dropout": 0.0, "residual_dropout": 0.0}
ALL_BUT_QKV_BIASES = {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": 7, "layer_types": MIXED}
PLAIN = {"rope_type": "default", "rope_theta": 70.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 70.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 70.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
NTK_ALPHA = {
    "rope_type": "dynamic",
    "rope_theta": 70.0,
    "alpha": 30.0,
    "factor": 1.0,
    "mscale": 1.0,
}


def row(name, model, config, layouts=(), slow=("tp2", "pp2", "vp2")):
    return Row(
        name,
        model,
        config,
        layouts,
        slow=tuple(layout for layout in slow if layout not in layouts),
        brief=True,
    )


ROWS = [
    row("starcoder2", "Starcoder2ForCausalLM", {**STARCODER, "sliding_window": 7}),
    row(
        "starcoder2_untied_no_biases",
        "Starcoder2ForCausalLM",
        {**STARCODER, "use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 3},
    ),
    row(
        "olmo3",
        "Olmo3ForCausalLM",
        {
            **SIZE,
            **WINDOWS,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
    ),
    row(
        "olmo3_tied",
        "Olmo3ForCausalLM",
        {**SIZE, **WINDOWS, "attention_bias": True, "tie_word_embeddings": True},
    ),
    row("seed_oss", "SeedOssForCausalLM", SEED),
    row(
        "seed_oss_all_biases",
        "SeedOssForCausalLM",
        {**SEED, "attention_out_bias": True, "mlp_bias": True},
    ),
    row("seed_oss_no_qkv_biases", "SeedOssForCausalLM", {**SEED, **ALL_BUT_QKV_BIASES}),
    row(
        "seed_oss_split_biases",
        "SeedOssForCausalLM",
        {**SEED, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    row(
        "apertus",
        "ApertusForCausalLM",
        {**WIDE, "rope_parameters": LLAMA3},
        ("tp2",),
        ("sp2", "pp2", "vp2"),
    ),
    row(
        "apertus_biases",
        "ApertusForCausalLM",
        {**SIZE, "attention_bias": True, "tie_word_embeddings": True},
    ),
    row("arcee", "ArceeForCausalLM", {**WIDE, "rope_parameters": LLAMA3}),
    row("arcee_biases", "ArceeForCausalLM", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    row("cwm", "CwmForCausalLM", {**WIDE, **WINDOWS, "rope_parameters": LLAMA3}),
    row(
        "cwm_bias",
        "CwmForCausalLM",
        {**WIDE, **WINDOWS, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    row("exaone4", "Exaone4ForCausalLM", {**SIZE, **WINDOWS}, ("tp2",)),
    row(
        "exaone4_no_windows",
        "Exaone4ForCausalLM",
        {
            **SIZE,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 4,
            "tie_word_embeddings": True,
        },
    ),
    row("ernie45", "Ernie4_5ForCausalLM", WIDE),
    row(
        "ernie45_biases",
        "Ernie4_5ForCausalLM",
        {**WIDE, "use_bias": True, "tie_word_embeddings": False},
    ),
    row("helium", "HeliumForCausalLM", {**SIZE, "head_dim": 8, "mlp_bias": True}),
    row("helium_biases", "HeliumForCausalLM", {**SIZE, "head_dim": 8, "attention_bias": True}),
    row(
        "hunyuan_dense",
        "HunYuanDenseV1ForCausalLM",
        {**WIDE, "rope_parameters": NTK_ALPHA},
        ("tp2",),
    ),
    row(
        "hunyuan_dense_biases",
        "HunYuanDenseV1ForCausalLM",
        {**WIDE, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 3},
    ),
    row(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        {
            **WIDE,
            **WINDOWS,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 2.0,
            "attn_logit_softcapping": 3.0,
        },
    ),
]
