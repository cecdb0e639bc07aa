# SPDX-License-Identifier: Apache-2.0
"""The text models of Ministral 3. Learning rates are our own: none are published.

Their config is ``text_config`` of the published one.
"""

from typing import Any

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import Generation


def _rope(theta: float) -> dict[str, Any]:
    """Rotary settings that extend 16k positions to 256k."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16384,
    }


MINISTRAL3 = Generation(
    {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "vocab_size": 131072,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(1000000.0),
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
)
MINISTRAL3_3B = MINISTRAL3.size("mistralai/Ministral-3-3B-Base-2512", 3072, 9216, 26, 32, 8, tie_word_embeddings=True)
MINISTRAL3_8B = MINISTRAL3.size("mistralai/Ministral-3-8B-Base-2512", 4096, 14336, 34, 32, 8)
MINISTRAL3_14B = MINISTRAL3.size(
    "mistralai/Ministral-3-14B-Base-2512", 5120, 16384, 40, 32, 8, rope_parameters=_rope(1000000000.0)
)

ministral3_3b_pretrain_config = pretrain_recipe(MINISTRAL3_3B, seq_length=8192, lr=3e-4)
"""Ministral 3 3B (text) pretraining, 8 x H100 80GB: 54 GB each, no model parallelism."""
ministral3_8b_pretrain_config = pretrain_recipe(MINISTRAL3_8B, layout(tp=2), seq_length=8192, lr=3e-4)
"""Ministral 3 8B (text) pretraining, 8 x H100 80GB: 62 GB each, TP2."""
ministral3_14b_pretrain_config = pretrain_recipe(MINISTRAL3_14B, layout(tp=4), seq_length=8192, lr=3e-4)
"""Ministral 3 14B (text) pretraining, 16 x H100 80GB: 46 GB each, TP4."""

ministral3_3b_finetune_config = finetune_recipe(MINISTRAL3_3B, lr=1e-5)
"""Ministral 3 3B (text) full fine-tuning, 8 x H100 80GB: 40 GB each, no model parallelism."""
ministral3_8b_finetune_config = finetune_recipe(MINISTRAL3_8B, layout(tp=2))
"""Ministral 3 8B (text) full fine-tuning, 8 x H100 80GB: 50 GB each, TP2."""
ministral3_14b_finetune_config = finetune_recipe(MINISTRAL3_14B, layout(tp=4))
"""Ministral 3 14B (text) full fine-tuning, 8 x H100 80GB: 49 GB each, TP4."""
