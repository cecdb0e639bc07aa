# SPDX-License-Identifier: Apache-2.0
"""gpt-oss."""

from tests.families.row import Row
from tests.quantize import store_in_mxfp4

SIZE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "max_position_embeddings": 256,
    "swiglu_limit": 0.4,  # of many gates
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 700.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}

ROWS = [
    Row(
        "gpt_oss", "GptOssForCausalLM", SIZE, layouts=("tp2", "pp2", "vp2", "ep2"), four=("tp2ep2",)
    ),
    Row(
        "gpt_oss_tied_no_attention_bias",
        "GptOssForCausalLM",
        {
            **SIZE,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * 4,
        },
        layouts=("ep2",),
        seed=1,  # seed 0 has a gate within rounding of the clamp, where its gradient jumps
    ),
    Row("gpt_oss_mxfp4", "GptOssForCausalLM", SIZE, layouts=("tp2", "ep2"), rewrite=store_in_mxfp4),
]
