# SPDX-License-Identifier: Apache-2.0
"""Gemma. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import Generation

GEMMA = Generation(
    {
        "model_type": "gemma",
        "architectures": ["GemmaForCausalLM"],
        "vocab_size": 256000,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
)
GEMMA_2B = GEMMA.size("google/gemma-2b", 2048, 16384, 18, 8, 1)
GEMMA_7B = GEMMA.size("google/gemma-7b", 3072, 24576, 28, 16, 16)

gemma_2b_pretrain_config = pretrain_recipe(GEMMA_2B, seq_length=8192, lr=3e-4)
"""Gemma 2B pretraining, 8 x H100 80GB: 58 GB each, no model parallelism."""
gemma_7b_pretrain_config = pretrain_recipe(GEMMA_7B, layout(tp=4), seq_length=8192, lr=3e-4)
"""Gemma 7B pretraining, 16 x H100 80GB: 41 GB each, TP4."""

gemma_2b_finetune_config = finetune_recipe(GEMMA_2B, lr=1e-5)
"""Gemma 2B full fine-tuning, 8 x H100 80GB: 38 GB each, no model parallelism."""
gemma_7b_finetune_config = finetune_recipe(GEMMA_7B, layout(tp=2))
"""Gemma 7B full fine-tuning, 8 x H100 80GB: 60 GB each, TP2."""
