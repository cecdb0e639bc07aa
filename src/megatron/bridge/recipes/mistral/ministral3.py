# SPDX-License-Identifier: Apache-2.0
"""The text models of Ministral 3. Learning rates are our own: none are published.

Their config is ``text_config`` of the published one.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

MINISTRAL3_8B = "mistralai/Ministral-3-8B-Base-2512"
MINISTRAL3_14B = "mistralai/Ministral-3-14B-Base-2512"

ministral3_3b_pretrain_config = pretrain_recipe("mistralai/Ministral-3-3B-Base-2512", seq_length=8192, lr=3e-4)
"""Ministral 3 3B (text) pretraining, 8 x H100 80GB: 54 GB each, no model parallelism."""
ministral3_8b_pretrain_config = pretrain_recipe(MINISTRAL3_8B, layout(tp=2), seq_length=8192, lr=3e-4)
"""Ministral 3 8B (text) pretraining, 8 x H100 80GB: 62 GB each, TP2."""
ministral3_14b_pretrain_config = pretrain_recipe(MINISTRAL3_14B, layout(tp=4), seq_length=8192, lr=3e-4)
"""Ministral 3 14B (text) pretraining, 16 x H100 80GB: 46 GB each, TP4."""

ministral3_3b_finetune_config = finetune_recipe("mistralai/Ministral-3-3B-Base-2512", lr=1e-5)
"""Ministral 3 3B (text) full fine-tuning, 8 x H100 80GB: 40 GB each, no model parallelism."""
ministral3_8b_finetune_config = finetune_recipe(MINISTRAL3_8B, layout(tp=2))
"""Ministral 3 8B (text) full fine-tuning, 8 x H100 80GB: 50 GB each, TP2."""
ministral3_14b_finetune_config = finetune_recipe(MINISTRAL3_14B, layout(tp=4))
"""Ministral 3 14B (text) full fine-tuning, 8 x H100 80GB: 49 GB each, TP4."""
