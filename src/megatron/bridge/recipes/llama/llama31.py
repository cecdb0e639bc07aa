# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1: Llama 3 with 128k positions, and a size more.

Learning rates are those of "The Llama 3 Herd of Models" (2024), table 3. The 126 layers of 405B cannot be shared
out evenly; with the embedding and the loss they count as 128.
"""

from typing import Any, Unpack

from megatron.bridge.recipes.core import pretrain, sft
from megatron.bridge.recipes.llama.llama3 import LLAMA3
from megatron.bridge.recipes.options import FinetuneOptions, PretrainOptions
from megatron.bridge.recipes.sizes import Generation
from megatron.bridge.training.config import ConfigContainer


def long_llama3(factor: float) -> dict[str, Any]:
    """What a Llama 3 with 128k positions adds."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"max_position_embeddings": 131072, "rope_scaling": scaling}


LLAMA31 = Generation({**LLAMA3.common, **long_llama3(8.0)})
LLAMA31_8B = LLAMA31.size("meta-llama/Llama-3.1-8B", 4096, 14336, 32, 32, 8)
LLAMA31_70B = LLAMA31.size("meta-llama/Llama-3.1-70B", 8192, 28672, 80, 64, 8)
LLAMA31_405B = LLAMA31.size("meta-llama/Llama-3.1-405B", 16384, 53248, 126, 128, 8)


def llama31_8b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 8B from random weights, 8 x H100 80GB: 61 GB each, TP2, the fewest that fit."""
    return pretrain(LLAMA31_8B, options, seq_length=8192, lr=3e-4, tensor_model_parallel_size=2)


def llama31_70b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 70B from random weights, 64 x H100 80GB: 65 GB each, TP8 PP2, the fewest that fit."""
    return pretrain(
        LLAMA31_70B,
        options,
        seq_length=8192,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=2,
    )


def llama31_405b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 405B from random weights, 1024 x H100 80GB: 66 GB each, TP8 PP8 CP4, the fewest that fit."""
    return pretrain(
        LLAMA31_405B,
        options,
        seq_length=8192,
        lr=8e-5,
        min_lr=8e-7,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        virtual_pipeline_model_parallel_size=4,
        embedding_and_loss_are_layers=True,
        context_parallel_size=4,
    )


def llama31_8b_128k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 8B on 128k tokens, 64 x H100 80GB: 67 GB each, TP4 CP4, the fewest that fit."""
    return pretrain(
        LLAMA31_8B,
        options,
        seq_length=131072,
        global_batch_size=32,
        lr=3e-4,
        tensor_model_parallel_size=4,
        context_parallel_size=4,
    )


def llama31_70b_128k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 70B on 128k tokens, 512 x H100 80GB: 59 GB each, TP8 PP2 CP16, the fewest that fit."""
    return pretrain(
        LLAMA31_70B,
        options,
        seq_length=131072,
        global_batch_size=32,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=2,
        context_parallel_size=16,
    )


def llama31_405b_128k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 405B on 128k tokens, 1024 x H100 80GB: 65 GB each, TP8 PP8 CP4, the fewest that fit."""
    return pretrain(
        LLAMA31_405B,
        options,
        seq_length=131072,
        global_batch_size=32,
        lr=8e-5,
        min_lr=8e-7,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        virtual_pipeline_model_parallel_size=4,
        embedding_and_loss_are_layers=True,
        context_parallel_size=4,
        recompute="full",
    )


def llama31_405b_fp8_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 405B in FP8, 1024 x H100 80GB: 54 GB each, TP8 PP16 CP4, the fewest that fit."""
    return pretrain(
        LLAMA31_405B,
        options,
        seq_length=8192,
        lr=8e-5,
        min_lr=8e-7,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=16,
        virtual_pipeline_model_parallel_size=4,
        embedding_and_loss_are_layers=True,
        context_parallel_size=4,
        precision="bf16_with_fp8_current_scaling_mixed",
    )


def llama31_405b_mxfp8_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 405B in MXFP8, 512 x B200 180GB: 141 GB each, TP8 PP8, the fewest that fit."""
    return pretrain(
        LLAMA31_405B,
        options,
        seq_length=8192,
        lr=8e-5,
        min_lr=8e-7,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        virtual_pipeline_model_parallel_size=8,
        embedding_and_loss_are_layers=True,
        precision="bf16_with_mxfp8_mixed",
    )


def llama31_405b_nvfp4_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 405B in NVFP4, 512 x B200 180GB: 135 GB each, TP8 PP8, the fewest that fit."""
    return pretrain(
        LLAMA31_405B,
        options,
        seq_length=8192,
        lr=8e-5,
        min_lr=8e-7,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        virtual_pipeline_model_parallel_size=8,
        embedding_and_loss_are_layers=True,
        precision="bf16_with_nvfp4_mixed",
    )


def llama31_8b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.1 8B, all weights, 8 x H100 80GB: 49 GB each, TP2, the fewest that fit."""
    return sft(LLAMA31_8B, options, tensor_model_parallel_size=2)


def llama31_70b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.1 70B, all weights, 32 x H100 80GB: 66 GB each, TP8 PP2, the fewest that fit."""
    return sft(LLAMA31_70B, options, tensor_model_parallel_size=8, pipeline_model_parallel_size=2)


def llama31_405b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.1 405B, all weights, 256 x H100 80GB: 61 GB each, TP8 PP16 CP2, the fewest that fit."""
    return sft(
        LLAMA31_405B,
        options,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=16,
        virtual_pipeline_model_parallel_size=4,
        embedding_and_loss_are_layers=True,
        context_parallel_size=2,
    )
