# SPDX-License-Identifier: Apache-2.0
"""The language models of Ministral 3. Learning rates are ours: none are published.

The hub keeps their numbers under ``text_config``.
"""

from typing import Any, Unpack

from megatron.bridge.recipes.core import pretrain, sft
from megatron.bridge.recipes.options import FinetuneOptions, PretrainOptions
from megatron.bridge.recipes.sizes import Generation
from megatron.bridge.training.config import ConfigContainer


def rope(theta: float) -> dict[str, Any]:
    """Positions up to 256k, from 16k, around the base ``theta``."""
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
        "rope_parameters": rope(1000000.0),
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
)
MINISTRAL3_3B = MINISTRAL3.size(
    "mistralai/Ministral-3-3B-Base-2512", 3072, 9216, 26, 32, 8, tie_word_embeddings=True
)
MINISTRAL3_8B = MINISTRAL3.size("mistralai/Ministral-3-8B-Base-2512", 4096, 14336, 34, 32, 8)
MINISTRAL3_14B = MINISTRAL3.size(
    "mistralai/Ministral-3-14B-Base-2512", 5120, 16384, 40, 32, 8, rope_parameters=rope(1000000000.0)
)


def ministral3_3b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Ministral 3 3B (text) from random weights, 8 x H100 80GB: 59 GB each, nothing is split."""
    return pretrain(MINISTRAL3_3B, options, seq_length=8192, lr=3e-4)


def ministral3_8b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Ministral 3 8B (text) from random weights, 8 x H100 80GB: 64 GB each, TP2, the fewest that fit."""
    return pretrain(MINISTRAL3_8B, options, seq_length=8192, lr=3e-4, tensor_model_parallel_size=2)


def ministral3_14b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Ministral 3 14B (text) from random weights, 16 x H100 80GB: 48 GB each, TP4, the fewest that fit."""
    return pretrain(MINISTRAL3_14B, options, seq_length=8192, lr=3e-4, tensor_model_parallel_size=4)


def ministral3_3b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Ministral 3 3B (text), all weights, 8 x H100 80GB: 43 GB each, nothing is split."""
    return sft(MINISTRAL3_3B, options, lr=1e-5)


def ministral3_8b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Ministral 3 8B (text), all weights, 8 x H100 80GB: 52 GB each, TP2, the fewest that fit."""
    return sft(MINISTRAL3_8B, options, tensor_model_parallel_size=2)


def ministral3_14b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Ministral 3 14B (text), all weights, 8 x H100 80GB: 49 GB each, TP4, the fewest that fit."""
    return sft(MINISTRAL3_14B, options, tensor_model_parallel_size=4)
