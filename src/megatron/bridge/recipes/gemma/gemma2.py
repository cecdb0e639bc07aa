# SPDX-License-Identifier: Apache-2.0
"""Gemma 2. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

gemma2_2b_pretrain_config = pretrain_recipe("google/gemma-2-2b", seq_length=8192, lr=3e-4)
"""Gemma 2 2B pretraining, 8 x H100 80GB: 62 GB each, no model parallelism."""
gemma2_9b_pretrain_config = pretrain_recipe("google/gemma-2-9b", layout(tp=4), seq_length=8192, lr=3e-4)
"""Gemma 2 9B pretraining, 16 x H100 80GB: 45 GB each, TP4."""
gemma2_27b_pretrain_config = pretrain_recipe("google/gemma-2-27b", layout(tp=8), seq_length=8192, lr=2e-4)
"""Gemma 2 27B pretraining, 32 x H100 80GB: 56 GB each, TP8."""
vaultgemma_1b_pretrain_config = pretrain_recipe("google/vaultgemma-1b", seq_length=1024, micro_batch_size=4, lr=5e-4)
"""VaultGemma 1B pretraining, 8 x H100 80GB: 23 GB each, no model parallelism."""

gemma2_2b_finetune_config = finetune_recipe("google/gemma-2-2b", lr=1e-5)
"""Gemma 2 2B full fine-tuning, 8 x H100 80GB: 41 GB each, no model parallelism."""
gemma2_9b_finetune_config = finetune_recipe("google/gemma-2-9b", layout(tp=2))
"""Gemma 2 9B full fine-tuning, 8 x H100 80GB: 66 GB each, TP2."""
gemma2_27b_finetune_config = finetune_recipe("google/gemma-2-27b", layout(tp=8))
"""Gemma 2 27B full fine-tuning, 16 x H100 80GB: 54 GB each, TP8."""
vaultgemma_1b_finetune_config = finetune_recipe("google/vaultgemma-1b", seq_length=1024, micro_batch_size=4, lr=1e-5)
"""VaultGemma 1B full fine-tuning, 8 x H100 80GB: 23 GB each, no model parallelism."""
