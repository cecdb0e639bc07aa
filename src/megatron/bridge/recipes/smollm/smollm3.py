# SPDX-License-Identifier: Apache-2.0
"""SmolLM3. Learning rate and batch size are from its announcement (2025)."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe

SMOLLM3_3B = "HuggingFaceTB/SmolLM3-3B"

smollm3_3b_pretrain_config = pretrain_recipe(SMOLLM3_3B, seq_length=4096, global_batch_size=576, lr=2e-4, min_lr=2e-6)
"""SmolLM3 3B pretraining, 8 x H100 80GB: 40 GB each, no model parallelism."""

smollm3_3b_finetune_config = finetune_recipe(SMOLLM3_3B, lr=1e-5)
"""SmolLM3 3B full fine-tuning, 8 x H100 80GB: 40 GB each, no model parallelism."""
