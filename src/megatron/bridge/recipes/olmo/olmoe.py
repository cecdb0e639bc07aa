# SPDX-License-Identifier: Apache-2.0
"""OLMoE. Learning rates and batch size are from "OLMoE: Open Mixture-of-Experts Language Models" (2024)."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.sizes import size_of

OLMOE_7B = size_of("allenai/OLMoE-1B-7B-0924")

olmoe_7b_pretrain_config = pretrain_recipe(OLMOE_7B, seq_length=4096, global_batch_size=1024, lr=4e-4, min_lr=4e-5)
"""OLMoE 7B pretraining, 8 x H100 80GB: 62 GB each, no model parallelism."""

olmoe_7b_finetune_config = finetune_recipe(OLMOE_7B)
"""OLMoE 7B full fine-tuning, 8 x H100 80GB: 62 GB each, no model parallelism."""
