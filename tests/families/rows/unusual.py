# SPDX-License-Identifier: Apache-2.0
"""Configs that nobody published: switches, patterns and rotary scalings that transformers computes all the same."""

from tests.families.row import Row
from tests.families.rows import (
    bamba,
    experts,
    jamba,
    kimi_linear,
    more_experts,
    nanochat,
    nemotron_h,
    qwen3_next,
)
from tests.families.rows.latent import SPARSE, V3

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}  # beyond 24 of the 40 tokens
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG |= {
    "short_factor": [1.0 + pair for pair in range(6)],
    "long_factor": [2.0 + pair for pair in range(6)],
}
STEPS = {"time_step_limit": [0.3, 0.9]}
SCATTERED = ["sparse", "dense", "sparse", "dense"]


def row(name, model, config, slow=("tp2", "pp2", "ep2"), brief=True):
    return Row(name, f"{model}ForCausalLM", config, (), slow=slow, brief=brief)


ROWS = [
    # three groups of two experts: Megatron-Core would rank groups by one expert, transformers does by two
    row(
        "deepseek_v3_plain_sigmoids", "DeepseekV3", {**V3, "topk_group": 3, "norm_topk_prob": False}
    ),
    row(
        "deepseek_v3_all_dense",
        "DeepseekV3",
        {**V3, "first_k_dense_replace": 4},
        slow=("tp2", "pp2"),
    ),
    row(
        "deepseek_v3_dynamic",
        "DeepseekV3",
        {**V3, "rope_parameters": DYNAMIC, "max_position_embeddings": 24},
    ),
    row(
        "deepseek_v32_pattern",
        "DeepseekV32",
        {
            **SPARSE,
            "mlp_layer_types": SCATTERED,
            "first_k_dense_replace": 0,
            "rope_parameters": LONG,
        },
    ),
    row(
        "glm_moe_dsa_all_dense",
        "GlmMoeDsa",
        {**SPARSE, "first_k_dense_replace": 4},
        slow=("tp2", "pp2"),
    ),
    row(
        "kimi_linear_one_expert",
        "KimiLinear",
        {**kimi_linear.SIZES, "num_experts_per_token": 1, "moe_renormalize": False},
        brief=False,  # which says that a family has no page of its own
    ),
    row(
        "llama4_yarn_normed_queries",
        "Llama4",
        {**more_experts.LLAMA_4, "rope_parameters": YARN, "rms_norm_eps": 1e-2},
    ),
    row(
        "nanochat_yarn",
        "NanoChat",
        {**nanochat.NANOCHAT, "rope_parameters": YARN},
        slow=("tp2", "pp2"),
    ),
    row("jamba_narrow_convolution", "Jamba", {**jamba.SIZES, "mamba_d_conv": 3}),
    row(
        "bamba_bounded_steps",
        "Bamba",
        {**bamba.SIZES, **STEPS, "mamba_d_conv": 3},
        slow=("tp2", "pp2"),
    ),
    row(
        "falcon_h1_bounded_steps",
        "FalconH1",
        {**bamba.H1, **STEPS, "mamba_d_conv": 5},
        slow=("tp2", "pp2"),
    ),
    row(
        "nemotron_h_plain_sigmoids",
        "NemotronH",
        {**nemotron_h.EXPERTS, "norm_topk_prob": False},
        slow=("ep2",),
    ),
    row(
        "qwen3_moe_biases_window",
        "Qwen3Moe",
        {**experts.SIX, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7},
    ),
    row(
        "qwen3_next_biases",
        "Qwen3Next",
        {**qwen3_next.SIZES, "attention_bias": True},
        slow=("tp2", "ep2"),
    ),
    row(
        "minimax_m2_linear",
        "MiniMaxM2",
        {
            **more_experts.WIDE,
            "num_local_experts": 6,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 500.0,
                "factor": 3.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
]
