# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H: groups of several Mamba heads, chunks that do not divide the sequence, stages of one kind."""

from tests.families.row import Row

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "mamba_num_heads": 12,
    "mamba_head_dim": 10,
    "ssm_state_size": 6,
    "n_groups": 2,
    "conv_kernel": 3,
    "chunk_size": 16,
    "time_step_min": 0.3,  # high enough to bound some steps
}
EXPERTS = {
    **SIZES,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "routed_scaling_factor": 2.5,
}
LATENT = {**EXPERTS, "moe_latent_size": 28}
GROUPS = {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2}


def row(name, layers, sizes, layouts, **more):
    """One whose layers are given by their symbols."""
    return Row(
        name, "NemotronHForCausalLM", {**sizes, "hybrid_override_pattern": layers}, layouts, **more
    )


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROWS = [
    row("nemotron_h", "M-M*", SIZES, ("tp2", "sp2", "pp2", "vp2"), four=("tp2pp2",)),
    row(
        "nemotron_h_biases",
        "*-M-",
        {**SIZES, "mlp_bias": True, "layer_norm_epsilon": 1e-3},
        ("tp2", "pp2"),
    ),
    row(
        "nemotron_h_experts",
        "ME*E",
        EXPERTS,
        ("tp2", "pp2", "vp2", "ep2", "etp2"),
        four=("tp2ep2",),
    ),
    row("nemotron_h_recomputed", "M*-E", EXPERTS, ("tp2",), provider=FULL),
    row("nemotron_h_latent", "ME*E", LATENT, ("sp2", "vp2", "ep2", "etp2"), four=("tp2ep2",)),
    row("nemotron_h_expert_groups", "MEM-", {**EXPERTS, **GROUPS}, ("ep2",)),
]
