# SPDX-License-Identifier: Apache-2.0
"""Llama 3.2, small, and Llama 3.3, which is 3.1 70B trained on. Learning rates of the small ones are ours."""

from typing import Unpack

from megatron.bridge.recipes.core import pretrain, sft
from megatron.bridge.recipes.llama.llama3 import LLAMA3
from megatron.bridge.recipes.llama.llama31 import LLAMA31, long_llama3
from megatron.bridge.recipes.options import FinetuneOptions, PretrainOptions
from megatron.bridge.recipes.sizes import Generation
from megatron.bridge.training.config import ConfigContainer

LLAMA32 = Generation({**LLAMA3.common, **long_llama3(32.0), "tie_word_embeddings": True})
LLAMA32_1B = LLAMA32.size("meta-llama/Llama-3.2-1B", 2048, 8192, 16, 32, 8, head_dim=64)
LLAMA32_3B = LLAMA32.size("meta-llama/Llama-3.2-3B", 3072, 8192, 28, 24, 8, head_dim=128)
LLAMA33_70B = LLAMA31.size(
    "meta-llama/Llama-3.3-70B-Instruct", 8192, 28672, 80, 64, 8, eos_token_id=[128001, 128008, 128009]
)


def llama32_1b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.2 1B from random weights, 8 x H100 80GB: 29 GB each, nothing is split."""
    return pretrain(LLAMA32_1B, options, seq_length=8192, lr=5e-4, min_lr=5e-6)


def llama32_3b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.2 3B from random weights, 8 x H100 80GB: 56 GB each, nothing is split."""
    return pretrain(LLAMA32_3B, options, seq_length=8192, lr=3e-4)


def llama33_70b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.3 70B from random weights, 64 x H100 80GB: 65 GB each, TP8 PP2, the fewest that fit."""
    return pretrain(
        LLAMA33_70B,
        options,
        seq_length=8192,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=2,
    )


def llama32_1b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.2 1B, all weights, 1 x H100 80GB: 32 GB, nothing is split."""
    return sft(LLAMA32_1B, options, lr=1e-5)


def llama32_3b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.2 3B, all weights, 8 x H100 80GB: 40 GB each, nothing is split."""
    return sft(LLAMA32_3B, options, lr=1e-5)


def llama33_70b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.3 70B, all weights, 32 x H100 80GB: 66 GB each, TP8 PP2, the fewest that fit."""
    return sft(LLAMA33_70B, options, tensor_model_parallel_size=8, pipeline_model_parallel_size=2)
