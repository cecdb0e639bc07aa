# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5, text: gated delta nets whose input projection is four tensors, dense and with experts."""

from tests.families.row import Row
from tests.families.rows.qwen3_next import SIZES

DENSE = {
    key: value
    for key, value in SIZES.items()
    if "expert" not in key and key not in ("router_aux_loss_coef", "moe_intermediate_size")
}
EXPERTS = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
KINDS = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}

ROWS = [
    Row(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        {**DENSE, "full_attention_interval": 2},
        ("tp2",),
        slow=("sp2", "pp2", "vp2"),
        brief=True,
    ),
    Row(
        "qwen3_5_irregular",
        "Qwen3_5ForCausalLM",
        {
            **DENSE,
            "layer_types": KINDS,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE,
        },
        (),
        slow=("tp2", "pp2"),
        brief=True,
    ),
    Row(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        {**EXPERTS, "full_attention_interval": 2},
        ("ep2",),
        slow=("tp2", "pp2", "etp2"),
        brief=True,
    ),
]
