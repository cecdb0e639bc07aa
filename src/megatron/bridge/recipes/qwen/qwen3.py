# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense. Learning rates are our own: none are published."""

from typing import Unpack

from megatron.bridge.recipes.builders import pretrain, sft
from megatron.bridge.recipes.options import FP8, MXFP8, FinetuneOptions, PretrainOptions, layout
from megatron.bridge.recipes.sizes import Generation
from megatron.bridge.training.config import ConfigContainer

QWEN3 = Generation(
    {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "attention_bias": False,
    }
)
QWEN3_600M = QWEN3.size("Qwen/Qwen3-0.6B", 1024, 3072, 28, 16, 8, tie_word_embeddings=True)
QWEN3_1P7B = QWEN3.size("Qwen/Qwen3-1.7B", 2048, 6144, 28, 16, 8, tie_word_embeddings=True)
QWEN3_4B = QWEN3.size("Qwen/Qwen3-4B", 2560, 9728, 36, 32, 8, tie_word_embeddings=True)
QWEN3_8B = QWEN3.size("Qwen/Qwen3-8B", 4096, 12288, 36, 32, 8)
QWEN3_14B = QWEN3.size("Qwen/Qwen3-14B", 5120, 17408, 40, 40, 8)
QWEN3_32B = QWEN3.size("Qwen/Qwen3-32B", 5120, 25600, 64, 64, 8)


def qwen3_600m_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Qwen 3 0.6B pretraining, 8 x H100 80GB: 27 GB each, no model parallelism."""
    return pretrain(QWEN3_600M, options, seq_length=4096, micro_batch_size=2, lr=1e-3, min_lr=1e-5)


def qwen3_1p7b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Qwen 3 1.7B pretraining, 8 x H100 80GB: 41 GB each, no model parallelism."""
    return pretrain(QWEN3_1P7B, options, seq_length=4096, micro_batch_size=2, lr=5e-4, min_lr=5e-6)


def qwen3_4b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Qwen 3 4B pretraining, 8 x H100 80GB: 53 GB each, no model parallelism."""
    return pretrain(QWEN3_4B, options, seq_length=4096, lr=3e-4)


def qwen3_8b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Qwen 3 8B pretraining, 8 x H100 80GB: 51 GB each, TP2."""
    return pretrain(QWEN3_8B, options, layout(tp=2), seq_length=4096, lr=3e-4)


def qwen3_14b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Qwen 3 14B pretraining, 16 x H100 80GB: 43 GB each, TP4."""
    return pretrain(QWEN3_14B, options, layout(tp=4), seq_length=4096, lr=3e-4)


def qwen3_32b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Qwen 3 32B pretraining, 32 x H100 80GB: 47 GB each, TP8."""
    return pretrain(QWEN3_32B, options, layout(tp=8), seq_length=4096, lr=2e-4)


def qwen3_8b_fp8_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Qwen 3 8B pretraining in FP8, 8 x H100 80GB: 58 GB each, TP2."""
    return pretrain(QWEN3_8B, options, FP8, layout(tp=2), seq_length=4096, lr=3e-4)


def qwen3_8b_mxfp8_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Qwen 3 8B pretraining in MXFP8, 8 x B200 180GB: 103 GB each, no model parallelism."""
    return pretrain(QWEN3_8B, options, MXFP8, seq_length=4096, lr=3e-4)


def qwen3_600m_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Qwen 3 0.6B full fine-tuning, 1 x H100 80GB: 22 GB, no model parallelism."""
    return sft(QWEN3_600M, options, lr=1e-5)


def qwen3_1p7b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Qwen 3 1.7B full fine-tuning, 1 x H100 80GB: 45 GB, no model parallelism."""
    return sft(QWEN3_1P7B, options, lr=1e-5)


def qwen3_4b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Qwen 3 4B full fine-tuning, 8 x H100 80GB: 53 GB each, no model parallelism."""
    return sft(QWEN3_4B, options, lr=1e-5)


def qwen3_8b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Qwen 3 8B full fine-tuning, 8 x H100 80GB: 51 GB each, TP2."""
    return sft(QWEN3_8B, options, layout(tp=2))


def qwen3_14b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Qwen 3 14B full fine-tuning, 8 x H100 80GB: 54 GB each, TP4."""
    return sft(QWEN3_14B, options, layout(tp=4))


def qwen3_32b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Qwen 3 32B full fine-tuning, 16 x H100 80GB: 59 GB each, TP8."""
    return sft(QWEN3_32B, options, layout(tp=8))
