# SPDX-License-Identifier: Apache-2.0
"""The text models of Ministral 3. Learning rates are our own: none are published.

Their config is ``text_config`` of the published one.
"""

from typing import Any, Unpack

from megatron.bridge.recipes.builders import pretrain, sft
from megatron.bridge.recipes.options import FinetuneOptions, PretrainOptions, layout
from megatron.bridge.recipes.sizes import Generation
from megatron.bridge.training.config import ConfigContainer


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
MINISTRAL3_3B = MINISTRAL3.size(
    "mistralai/Ministral-3-3B-Base-2512", 3072, 9216, 26, 32, 8, tie_word_embeddings=True
)
MINISTRAL3_8B = MINISTRAL3.size("mistralai/Ministral-3-8B-Base-2512", 4096, 14336, 34, 32, 8)
MINISTRAL3_14B = MINISTRAL3.size(
    "mistralai/Ministral-3-14B-Base-2512", 5120, 16384, 40, 32, 8, rope_parameters=_rope(1000000000.0)
)


def ministral3_3b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Ministral 3 3B (text) pretraining, 8 x H100 80GB: 59 GB each, no model parallelism."""
    return pretrain(MINISTRAL3_3B, options, seq_length=8192, lr=3e-4)


def ministral3_8b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Ministral 3 8B (text) pretraining, 8 x H100 80GB: 64 GB each, TP2."""
    return pretrain(MINISTRAL3_8B, options, layout(tp=2), seq_length=8192, lr=3e-4)


def ministral3_14b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Ministral 3 14B (text) pretraining, 16 x H100 80GB: 48 GB each, TP4."""
    return pretrain(MINISTRAL3_14B, options, layout(tp=4), seq_length=8192, lr=3e-4)


def ministral3_3b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Ministral 3 3B (text) full fine-tuning, 8 x H100 80GB: 43 GB each, no model parallelism."""
    return sft(MINISTRAL3_3B, options, lr=1e-5)


def ministral3_8b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Ministral 3 8B (text) full fine-tuning, 8 x H100 80GB: 52 GB each, TP2."""
    return sft(MINISTRAL3_8B, options, layout(tp=2))


def ministral3_14b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Ministral 3 14B (text) full fine-tuning, 8 x H100 80GB: 49 GB each, TP4."""
    return sft(MINISTRAL3_14B, options, layout(tp=4))
