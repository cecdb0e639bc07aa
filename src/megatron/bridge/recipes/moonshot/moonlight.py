# SPDX-License-Identifier: Apache-2.0
"""Moonlight. The learning rate is from "Muon is Scalable for LLM Training" (2025); the optimizer here is Adam."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

MOONLIGHT_16B = "moonshotai/Moonlight-16B-A3B"

moonlight_16b_pretrain_config = pretrain_recipe(MOONLIGHT_16B, layout(ep=4), seq_length=4096, lr=4.2e-4, min_lr=4.2e-5)
"""Moonlight 16B-A3B pretraining, 16 x H100 80GB: 62 GB each, EP4."""

moonlight_16b_finetune_config = finetune_recipe(MOONLIGHT_16B, layout(tp=2, ep=4, etp=1))
"""Moonlight 16B-A3B full fine-tuning, 8 x H100 80GB: 60 GB each, TP2 EP4."""
