# SPDX-License-Identifier: Apache-2.0
"""Mixtral. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

mixtral_8x7b_pretrain_config = pretrain_recipe(
    "mistralai/Mixtral-8x7B-v0.1", layout(tp=2, pp=4, vp=4, ep=4, etp=1), seq_length=4096, lr=3e-4
)
"""Mixtral 8x7B pretraining, 32 x H100 80GB: 57 GB each, TP2 PP4 EP4."""
mixtral_8x22b_pretrain_config = pretrain_recipe(
    "mistralai/Mixtral-8x22B-v0.1", layout(tp=4, pp=4, vp=7, ep=8, etp=1), seq_length=4096, lr=2e-4
)
"""Mixtral 8x22B pretraining, 128 x H100 80GB: 63 GB each, TP4 PP4 EP8."""

mixtral_8x7b_finetune_config = finetune_recipe("mistralai/Mixtral-8x7B-v0.1", layout(tp=2, pp=4, vp=4, ep=4, etp=1))
"""Mixtral 8x7B full fine-tuning, 32 x H100 80GB: 57 GB each, TP2 PP4 EP4."""
mixtral_8x22b_finetune_config = finetune_recipe("mistralai/Mixtral-8x22B-v0.1", layout(tp=8, pp=4, vp=7, ep=8, etp=1))
"""Mixtral 8x22B full fine-tuning, 64 x H100 80GB: 64 GB each, TP8 PP4 EP8."""
