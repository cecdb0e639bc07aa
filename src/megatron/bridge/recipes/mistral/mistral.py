# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B, NeMo and Small. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import Generation

MISTRAL = Generation(
    {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 131072,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
MISTRAL_7B = MISTRAL.size("mistralai/Mistral-7B-v0.3", 4096, 14336, 32, 32, 8, vocab_size=32768)
MISTRAL_NEMO_12B = MISTRAL.size(
    "mistralai/Mistral-Nemo-Base-2407", 5120, 14336, 40, 32, 8, max_position_embeddings=131072
)
MISTRAL_SMALL_24B = MISTRAL.size(
    "mistralai/Mistral-Small-24B-Base-2501", 5120, 32768, 40, 32, 8, rope_theta=100000000.0
)

mistral_7b_pretrain_config = pretrain_recipe(MISTRAL_7B, layout(tp=2), seq_length=8192, lr=3e-4)
"""Mistral 7B pretraining, 8 x H100 80GB: 53 GB each, TP2."""
mistral_nemo_12b_pretrain_config = pretrain_recipe(MISTRAL_NEMO_12B, layout(tp=4), seq_length=8192, lr=3e-4)
"""Mistral NeMo 12B pretraining, 16 x H100 80GB: 42 GB each, TP4."""
mistral_small_24b_pretrain_config = pretrain_recipe(MISTRAL_SMALL_24B, layout(tp=4), seq_length=8192, lr=2e-4)
"""Mistral Small 24B pretraining, 32 x H100 80GB: 68 GB each, TP4."""

mistral_7b_finetune_config = finetune_recipe(MISTRAL_7B, layout(tp=2))
"""Mistral 7B full fine-tuning, 8 x H100 80GB: 43 GB each, TP2."""
mistral_nemo_12b_finetune_config = finetune_recipe(MISTRAL_NEMO_12B, layout(tp=2))
"""Mistral NeMo 12B full fine-tuning, 8 x H100 80GB: 70 GB each, TP2."""
mistral_small_24b_finetune_config = finetune_recipe(MISTRAL_SMALL_24B, layout(tp=4))
"""Mistral Small 24B full fine-tuning, 16 x H100 80GB: 65 GB each, TP4."""
