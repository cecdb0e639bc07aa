# SPDX-License-Identifier: Apache-2.0
"""Llama 3, whose numbers the later ones of the generation share.

Learning rates are those of "The Llama 3 Herd of Models" (2024), table 3.
"""

from typing import Unpack

from megatron.bridge.recipes.core import pretrain, sft
from megatron.bridge.recipes.options import FinetuneOptions, LowPrecision, PretrainOptions
from megatron.bridge.recipes.sizes import Generation
from megatron.bridge.training.config import ConfigContainer

LLAMA3 = Generation(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }
)
LLAMA3_8B = LLAMA3.size("meta-llama/Meta-Llama-3-8B", 4096, 14336, 32, 32, 8)
LLAMA3_70B = LLAMA3.size("meta-llama/Meta-Llama-3-70B", 8192, 28672, 80, 64, 8)


def llama3_8b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B from random weights, 8 x H100 80GB: 61 GB each, TP2, the fewest that fit."""
    return pretrain(LLAMA3_8B, options, seq_length=8192, lr=3e-4, tensor_model_parallel_size=2)


def llama3_8b_16k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B on 16k tokens, 16 x H100 80GB: 56 GB each, TP2 CP2, the fewest that fit."""
    return pretrain(
        LLAMA3_8B,
        options,
        seq_length=16384,
        global_batch_size=256,
        lr=3e-4,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
    )


def llama3_8b_64k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B on 64k tokens, 32 x H100 80GB: 67 GB each, TP4 CP2, the fewest that fit."""
    return pretrain(
        LLAMA3_8B,
        options,
        seq_length=65536,
        global_batch_size=64,
        lr=3e-4,
        tensor_model_parallel_size=4,
        context_parallel_size=2,
    )


def llama3_8b_128k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B on 128k tokens, 64 x H100 80GB: 67 GB each, TP4 CP4, the fewest that fit."""
    return pretrain(
        LLAMA3_8B,
        options,
        seq_length=131072,
        global_batch_size=32,
        lr=3e-4,
        tensor_model_parallel_size=4,
        context_parallel_size=4,
    )


def llama3_70b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B from random weights, 64 x H100 80GB: 65 GB each, TP8 PP2, the fewest that fit."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=8192,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=2,
    )


def llama3_70b_16k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B on 16k tokens, 128 x H100 80GB: 59 GB each, TP8 PP2 CP2, the fewest that fit."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=16384,
        global_batch_size=256,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
    )


def llama3_70b_64k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B on 64k tokens, 256 x H100 80GB: 58 GB each, TP8 PP2 CP8, the fewest that fit."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=65536,
        global_batch_size=64,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=2,
        context_parallel_size=8,
    )


def llama3_70b_128k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B on 128k tokens, 512 x H100 80GB: 59 GB each, TP8 PP2 CP16, the fewest that fit."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=131072,
        global_batch_size=32,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=2,
        context_parallel_size=16,
    )


def llama3_8b_fp8_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B in FP8, 8 x H100 80GB: 68 GB each, TP2, the fewest that fit."""
    return pretrain(
        LLAMA3_8B,
        options,
        seq_length=8192,
        lr=3e-4,
        tensor_model_parallel_size=2,
        precision="bf16_with_fp8_current_scaling_mixed",
    )


def llama3_8b_fp8_blockwise_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B in blockwise FP8, 8 x H100 80GB: 68 GB each, TP2, the fewest that fit."""
    return pretrain(
        LLAMA3_8B,
        options,
        seq_length=8192,
        lr=3e-4,
        tensor_model_parallel_size=2,
        precision="bf16_with_fp8_subchannel_scaling_mixed",
    )


def llama3_8b_mxfp8_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B in MXFP8, 8 x B200 180GB: 123 GB each, nothing is split."""
    return pretrain(LLAMA3_8B, options, seq_length=8192, lr=3e-4, precision="bf16_with_mxfp8_mixed")


def llama3_8b_nvfp4_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B in NVFP4, 8 x B200 180GB: 116 GB each, nothing is split."""
    return pretrain(LLAMA3_8B, options, seq_length=8192, lr=3e-4, precision="bf16_with_nvfp4_mixed")


def llama3_8b_low_precision_pretrain_config(
    mixed_precision_recipe: LowPrecision = "bf16_with_fp8_current_scaling_mixed",
    **options: Unpack[PretrainOptions],
) -> ConfigContainer:
    """Llama 3 8B in a low precision, 8 x H100 80GB: 68 GB each, TP2, the fewest that fit.

    Args:
        mixed_precision_recipe: Which one; ``precision`` wins where it is given, too.
        **options: As of the other recipes.
    """
    return pretrain(
        LLAMA3_8B,
        options,
        seq_length=8192,
        lr=3e-4,
        tensor_model_parallel_size=2,
        precision=mixed_precision_recipe,
    )


def llama3_70b_fp8_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B in FP8, 64 x H100 80GB: 61 GB each, TP8 PP4, the fewest that fit."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=8192,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=5,
        precision="bf16_with_fp8_current_scaling_mixed",
    )


def llama3_70b_fp8_blockwise_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B in blockwise FP8, 64 x H100 80GB: 61 GB each, TP8 PP4, the fewest that fit."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=8192,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=5,
        precision="bf16_with_fp8_subchannel_scaling_mixed",
    )


def llama3_70b_mxfp8_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B in MXFP8, 64 x B200 180GB: 133 GB each, TP4 PP2, the fewest that fit."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=8192,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        precision="bf16_with_mxfp8_mixed",
    )


def llama3_70b_nvfp4_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B in NVFP4, 64 x B200 180GB: 124 GB each, TP4 PP2, the fewest that fit."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=8192,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        precision="bf16_with_nvfp4_mixed",
    )


def llama3_8b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3 8B, all weights, 8 x H100 80GB: 49 GB each, TP2, the fewest that fit."""
    return sft(LLAMA3_8B, options, tensor_model_parallel_size=2)


def llama3_70b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3 70B, all weights, 32 x H100 80GB: 66 GB each, TP8 PP2, the fewest that fit."""
    return sft(LLAMA3_70B, options, tensor_model_parallel_size=8, pipeline_model_parallel_size=2)
