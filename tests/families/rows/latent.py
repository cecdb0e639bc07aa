# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention: DeepSeek-V2 and V3 with their relatives, GLM-4.7-Flash."""

from tests.families.row import Row
from tests.quantize import store_in_fp8

# no two widths are equal; neither latent, nor its part with positions, divides by a head
_LATENT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 22,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 12,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_V2 = {**_LATENT, "n_group": 1, "topk_group": 1}
_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
V3 = {**_LATENT, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}
_GLM = {
    **{key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-2,  # the latents' norms have one of their own
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
SPARSE = {
    **{key: value for key, value in _GLM.items() if key != "rms_norm_eps"},
    "index_n_heads": 10,
    "index_head_dim": 18,
    "index_topk": 9,
    "first_k_dense_replace": 1,
}
_LAYOUTS = ("tp2", "pp2", "vp2", "ep2", "etp2")

ROWS = [
    Row(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {**_V2, **_GROUPS, "rope_parameters": _YARN},
        _LAYOUTS,
    ),
    Row(
        "deepseek_v2_lite",
        "DeepseekV2ForCausalLM",
        {**_V2, "q_lora_rank": None},
        ("tp2", "pp2", "ep2"),
    ),
    Row(
        "deepseek_v2_unequal_mscale",
        "DeepseekV2ForCausalLM",
        {**_V2, "rope_parameters": {**_YARN, "mscale": 1.5}, "tie_word_embeddings": True},
        ("tp2",),
    ),
    Row(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {**V3, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        _LAYOUTS,
        ("tp2pp2", "tp2ep2"),
    ),
    Row(
        "deepseek_v3_fp8",
        "DeepseekV3ForCausalLM",
        {**V3, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        ("tp2", "ep2"),
        rewrite=store_in_fp8,
    ),
    Row(
        "moonlight",
        "DeepseekV3ForCausalLM",
        {**V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-2},
        ("tp2", "ep2"),
    ),
    Row(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        {**_GLM, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
        ("tp2", "pp2", "ep2"),
    ),
    Row(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        {
            **SPARSE,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        ("tp2", "sp2", "pp2", "vp2", "ep2", "etp2"),
        ("tp2pp2",),
    ),
    Row(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        {**SPARSE, "indexer_types": ["full", "shared", "full", "shared"]},
        ("tp2", "pp2", "ep2"),
    ),
]
