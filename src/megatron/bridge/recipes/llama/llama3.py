# SPDX-License-Identifier: Apache-2.0
"""Llama 3, 3.1 and 3.2.

How the layouts were chosen, for GPUs of 80 GB. Bytes of one process, in bf16 with fp32 gradients and a sharded
optimizer: 6 for each parameter that it holds, 12 more for each over the number of replicas and context ranks; for
activations about 34 x sequence x hidden size x layers / (tensor x context ranks); for the logits 10 x sequence x
vocabulary / (the same). Tensor parallelism stays within a node of 8 and goes with sequence parallelism; the
smallest model parallelism that leaves a tenth of the memory free is taken. These are estimates, not measurements.
The 126 layers of 405B cannot be shared out evenly; with the embedding and the loss they count as 128.

Learning rates of 8B, 70B and 405B are those of "The Llama 3 Herd of Models" (2024), table 3; those of 1B and 3B
are ours.
"""

from typing import Any, Unpack

from megatron.bridge.recipes.core import pretrain, sft
from megatron.bridge.recipes.options import FinetuneOptions, PretrainOptions
from megatron.bridge.recipes.sizes import Size
from megatron.bridge.training.config import ConfigContainer

LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
SHAPE_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SHAPE_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SHAPE_405B: dict[str, Any] = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}


def _long(factor: float) -> dict[str, Any]:
    """What a Llama with 128k positions adds."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"max_position_embeddings": 131072, "rope_scaling": scaling}


LLAMA3_8B = Size("meta-llama/Meta-Llama-3-8B", {**LLAMA3, **SHAPE_8B})
LLAMA3_70B = Size("meta-llama/Meta-Llama-3-70B", {**LLAMA3, **SHAPE_70B})
LLAMA31_8B = Size("meta-llama/Llama-3.1-8B", {**LLAMA3, **SHAPE_8B, **_long(8.0)})
LLAMA31_70B = Size("meta-llama/Llama-3.1-70B", {**LLAMA3, **SHAPE_70B, **_long(8.0)})
LLAMA31_405B = Size("meta-llama/Llama-3.1-405B", {**LLAMA3, **SHAPE_405B, **_long(8.0)})
LLAMA32_1B = Size(
    "meta-llama/Llama-3.2-1B",
    {
        **LLAMA3,
        **_long(32.0),
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
)
LLAMA32_3B = Size(
    "meta-llama/Llama-3.2-3B",
    {
        **LLAMA3,
        **_long(32.0),
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
)

# ------------------------------------------------------------------------------------------------------ pretrain


def llama32_1b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.2 1B from random weights, 8 x H100 80GB: 29 GB a GPU, so nothing is split."""
    return pretrain(LLAMA32_1B, options, seq_length=8192, lr=5e-4, min_lr=5e-6)


def llama32_3b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.2 3B from random weights, 8 x H100 80GB: 59 GB a GPU, so nothing is split."""
    return pretrain(LLAMA32_3B, options, seq_length=8192, lr=3e-4)


def llama3_8b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B from random weights, 8 x H100 80GB: 60 GB a GPU with the matrices in two; 107 GB in one."""
    return pretrain(LLAMA3_8B, options, seq_length=8192, lr=3e-4, tensor_model_parallel_size=2)


def llama3_8b_16k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B on 16k tokens, 8 x H100 80GB: 60 GB a GPU, with each sequence on two."""
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
    """Llama 3 8B on 64k tokens, 32 x H100 80GB: 39 GB a GPU; 77 GB on half as many."""
    return pretrain(
        LLAMA3_8B,
        options,
        seq_length=65536,
        global_batch_size=64,
        lr=3e-4,
        tensor_model_parallel_size=4,
        context_parallel_size=4,
    )


def llama3_8b_128k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 8B on 128k tokens, 64 x H100 80GB: 37 GB a GPU; 74 GB on half as many."""
    return pretrain(
        LLAMA3_8B,
        options,
        seq_length=131072,
        global_batch_size=32,
        lr=3e-4,
        tensor_model_parallel_size=4,
        context_parallel_size=8,
    )


def llama3_70b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B from random weights, 64 x H100 80GB: 55 GB a GPU with 32 of them to a model."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=8192,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=5,
    )


def llama3_70b_16k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B on 16k tokens, 128 x H100 80GB: 48 GB a GPU, with each sequence on two."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=16384,
        global_batch_size=256,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=5,
        context_parallel_size=2,
    )


def llama3_70b_64k_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3 70B on 64k tokens, 256 x H100 80GB: 45 GB a GPU, with each sequence on eight."""
    return pretrain(
        LLAMA3_70B,
        options,
        seq_length=65536,
        global_batch_size=64,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=5,
        context_parallel_size=8,
    )


def llama31_8b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 8B from random weights, 8 x H100 80GB: 60 GB a GPU with the matrices in two; 107 GB in one."""
    return pretrain(LLAMA31_8B, options, seq_length=8192, lr=3e-4, tensor_model_parallel_size=2)


def llama31_70b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 70B from random weights, 64 x H100 80GB: 55 GB a GPU with 32 of them to a model."""
    return pretrain(
        LLAMA31_70B,
        options,
        seq_length=8192,
        lr=1.5e-4,
        min_lr=1.5e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=5,
    )


def llama31_405b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """Llama 3.1 405B from random weights, 1024 x H100 80GB: 66 GB a GPU, embedding and loss as layers."""
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


# ------------------------------------------------------------------------------------------------------ finetune


def llama32_1b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.2 1B, all weights, 1 x H100 80GB: 32 GB."""
    return sft(LLAMA32_1B, options, lr=1e-5)


def llama32_3b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.2 3B, all weights, 8 x H100 80GB: 41 GB a GPU; 75 GB on a single one."""
    return sft(LLAMA32_3B, options, lr=1e-5)


def llama3_8b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3 8B, all weights, 8 x H100 80GB: 48 GB a GPU with the matrices in two; 84 GB in one."""
    return sft(LLAMA3_8B, options, tensor_model_parallel_size=2)


def llama3_70b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3 70B, all weights, 32 x H100 80GB: 55 GB a GPU, with all of them to one model."""
    return sft(
        LLAMA3_70B,
        options,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=5,
    )


def llama31_8b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.1 8B, all weights, 8 x H100 80GB: 48 GB a GPU with the matrices in two; 84 GB in one."""
    return sft(LLAMA31_8B, options, tensor_model_parallel_size=2)


def llama31_70b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.1 70B, all weights, 32 x H100 80GB: 55 GB a GPU, with all of them to one model."""
    return sft(
        LLAMA31_70B,
        options,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=5,
    )


def llama31_405b_finetune_config(**options: Unpack[FinetuneOptions]) -> ConfigContainer:
    """Llama 3.1 405B, all weights, 256 x H100 80GB: 63 GB a GPU, embedding and loss as layers."""
    return sft(
        LLAMA31_405B,
        options,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=16,
        virtual_pipeline_model_parallel_size=4,
        embedding_and_loss_are_layers=True,
        context_parallel_size=2,
    )
