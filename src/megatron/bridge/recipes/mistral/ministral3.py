# SPDX-License-Identifier: Apache-2.0
"""Ministral 3: pretraining of the text models, fine-tuning with images.

The text models' config is ``text_config`` of the published one. Learning rates of pretraining are our own, those of
fine-tuning are Megatron Bridge's. The memory of fine-tuning is that of samples that consist of images, which are
shared out evenly over tensor-parallel ranks.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

MINISTRAL3_8B = "mistralai/Ministral-3-8B-Base-2512"
MINISTRAL3_14B = "mistralai/Ministral-3-14B-Base-2512"
MINISTRAL3_8B_VL = "mistralai/Ministral-3-8B-Instruct-2512"
MINISTRAL3_14B_VL = "mistralai/Ministral-3-14B-Instruct-2512"

ministral3_3b_pretrain_config = pretrain_recipe("mistralai/Ministral-3-3B-Base-2512", seq_length=8192, lr=3e-4)
"""Ministral 3 3B (text) pretraining, 8 x H100 80GB: 54 GB each, no model parallelism."""
ministral3_8b_pretrain_config = pretrain_recipe(MINISTRAL3_8B, layout(tp=2), seq_length=8192, lr=3e-4)
"""Ministral 3 8B (text) pretraining, 8 x H100 80GB: 62 GB each, TP2."""
ministral3_14b_pretrain_config = pretrain_recipe(MINISTRAL3_14B, layout(tp=4), seq_length=8192, lr=3e-4)
"""Ministral 3 14B (text) pretraining, 16 x H100 80GB: 46 GB each, TP4."""

ministral3_3b_finetune_config = finetune_recipe("mistralai/Ministral-3-3B-Instruct-2512")
"""Ministral 3 3B full fine-tuning, 8 x H100 80GB: 67 GB each, no model parallelism."""
ministral3_8b_finetune_config = finetune_recipe(MINISTRAL3_8B_VL, layout(tp=2))
"""Ministral 3 8B full fine-tuning, 8 x H100 80GB: 66 GB each, TP2."""
ministral3_14b_finetune_config = finetune_recipe(MINISTRAL3_14B_VL, layout(tp=4))
"""Ministral 3 14B full fine-tuning, 8 x H100 80GB: 60 GB each, TP4."""
