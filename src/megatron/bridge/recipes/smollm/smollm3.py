# SPDX-License-Identifier: Apache-2.0
"""SmolLM3. Learning rate and batch size are from its announcement (2025)."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.sizes import Generation

SMOLLM3 = Generation(
    {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "vocab_size": 128256,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "max_position_embeddings": 65536,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128012,
        "pad_token_id": 128004,
    }
)
SMOLLM3_3B = SMOLLM3.size("HuggingFaceTB/SmolLM3-3B", 2048, 11008, 36, 16, 4)

smollm3_3b_pretrain_config = pretrain_recipe(SMOLLM3_3B, seq_length=4096, global_batch_size=576, lr=2e-4, min_lr=2e-6)
"""SmolLM3 3B pretraining, 8 x H100 80GB: 40 GB each, no model parallelism."""

smollm3_3b_finetune_config = finetune_recipe(SMOLLM3_3B, lr=1e-5)
"""SmolLM3 3B full fine-tuning, 8 x H100 80GB: 40 GB each, no model parallelism."""
