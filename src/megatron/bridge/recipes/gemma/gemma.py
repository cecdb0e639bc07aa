# SPDX-License-Identifier: Apache-2.0
"""Gemma. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

gemma_2b_pretrain_config = pretrain_recipe("google/gemma-2b", seq_length=8192, lr=3e-4)
"""Gemma 2B pretraining, 8 x H100 80GB: 58 GB each, no model parallelism."""
gemma_7b_pretrain_config = pretrain_recipe("google/gemma-7b", layout(tp=4), seq_length=8192, lr=3e-4)
"""Gemma 7B pretraining, 16 x H100 80GB: 41 GB each, TP4."""

gemma_2b_finetune_config = finetune_recipe("google/gemma-2b", lr=1e-5)
"""Gemma 2B full fine-tuning, 8 x H100 80GB: 38 GB each, no model parallelism."""
gemma_7b_finetune_config = finetune_recipe("google/gemma-7b", layout(tp=2))
"""Gemma 7B full fine-tuning, 8 x H100 80GB: 60 GB each, TP2."""
