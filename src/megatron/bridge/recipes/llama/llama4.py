# SPDX-License-Identifier: Apache-2.0
"""The text model of Llama 4. Learning rates are our own."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import LayoutOptions, layout

LLAMA4_SCOUT_109B = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
_LAYOUT: LayoutOptions = layout(tp=2, pp=4, ep=8, etp=1)

llama4_scout_109b_pretrain_config = pretrain_recipe(LLAMA4_SCOUT_109B, _LAYOUT, seq_length=4096, lr=2e-4)
"""Llama 4 Scout 109B-A17B (text) pretraining, 64 x H100 80GB: 69 GB each, TP2 PP4 EP8."""
llama4_scout_109b_finetune_config = finetune_recipe(LLAMA4_SCOUT_109B, _LAYOUT)
"""Llama 4 Scout 109B-A17B (text) full fine-tuning, 64 x H100 80GB: 69 GB each, TP2 PP4 EP8."""
