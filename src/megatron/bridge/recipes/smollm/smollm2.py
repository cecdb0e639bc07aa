# SPDX-License-Identifier: Apache-2.0
"""SmolLM2: small enough to be trained on one GPU, or shown on a laptop."""

from typing import Unpack

from megatron.bridge.recipes.core import pretrain, sft
from megatron.bridge.recipes.options import FinetuneOptions, PretrainOptions
from megatron.bridge.recipes.sizes import Size
from megatron.bridge.training.config import ConfigContainer

SMOLLM2_135M = Size(
    "HuggingFaceTB/SmolLM2-135M",
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "initializer_range": 0.041666666666666664,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)


def smollm2_135m_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """SmolLM2 135M from random weights, 1 x H100 80GB: 38 GB, 35 of them for 16 samples at a time."""
    return pretrain(SMOLLM2_135M, options, seq_length=2048, micro_batch_size=16, lr=1e-3, min_lr=1e-4)


def smollm2_135m_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """SmolLM2 135M, all weights, 1 x H100 80GB: 38 GB, 35 of them for 16 samples at a time."""
    return sft(SMOLLM2_135M, options, seq_length=2048, micro_batch_size=16, lr=1e-4)
