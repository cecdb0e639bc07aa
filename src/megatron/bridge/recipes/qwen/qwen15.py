# SPDX-License-Identifier: Apache-2.0
"""Qwen 1.5. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

QWEN15_500M = "Qwen/Qwen1.5-0.5B"
QWEN15_1P8B = "Qwen/Qwen1.5-1.8B"
QWEN15_72B = "Qwen/Qwen1.5-72B"

qwen15_500m_pretrain_config = pretrain_recipe(QWEN15_500M, seq_length=4096, micro_batch_size=2, lr=1e-3, min_lr=1e-5)
"""Qwen 1.5 0.5B pretraining, 8 x H100 80GB: 16 GB each, no model parallelism."""
qwen15_1p8b_pretrain_config = pretrain_recipe(QWEN15_1P8B, seq_length=4096, micro_batch_size=2, lr=5e-4, min_lr=5e-6)
"""Qwen 1.5 1.8B pretraining, 8 x H100 80GB: 34 GB each, no model parallelism."""
qwen15_4b_pretrain_config = pretrain_recipe("Qwen/Qwen1.5-4B", seq_length=4096, lr=3e-4)
"""Qwen 1.5 4B pretraining, 8 x H100 80GB: 48 GB each, no model parallelism."""
qwen15_7b_pretrain_config = pretrain_recipe("Qwen/Qwen1.5-7B", layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen 1.5 7B pretraining, 8 x H100 80GB: 46 GB each, TP2."""
qwen15_14b_pretrain_config = pretrain_recipe("Qwen/Qwen1.5-14B", layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen 1.5 14B pretraining, 16 x H100 80GB: 70 GB each, TP2."""
qwen15_32b_pretrain_config = pretrain_recipe("Qwen/Qwen1.5-32B", layout(tp=8), seq_length=4096, lr=2e-4)
"""Qwen 1.5 32B pretraining, 32 x H100 80GB: 45 GB each, TP8."""
qwen15_72b_pretrain_config = pretrain_recipe(QWEN15_72B, layout(tp=8, pp=2), seq_length=4096, lr=1.5e-4, min_lr=1.5e-6)
"""Qwen 1.5 72B pretraining, 64 x H100 80GB: 54 GB each, TP8 PP2."""
qwen15_moe_a2p7b_pretrain_config = pretrain_recipe("Qwen/Qwen1.5-MoE-A2.7B", layout(ep=4), seq_length=4096, lr=3e-4)
"""Qwen 1.5 MoE A2.7B pretraining, 16 x H100 80GB: 56 GB each, EP4."""

qwen15_500m_finetune_config = finetune_recipe(QWEN15_500M, lr=1e-5)
"""Qwen 1.5 0.5B full fine-tuning, 1 x H100 80GB: 15 GB, no model parallelism."""
qwen15_1p8b_finetune_config = finetune_recipe(QWEN15_1P8B, lr=1e-5)
"""Qwen 1.5 1.8B full fine-tuning, 8 x H100 80GB: 24 GB each, no model parallelism."""
qwen15_4b_finetune_config = finetune_recipe("Qwen/Qwen1.5-4B", lr=1e-5)
"""Qwen 1.5 4B full fine-tuning, 8 x H100 80GB: 48 GB each, no model parallelism."""
qwen15_7b_finetune_config = finetune_recipe("Qwen/Qwen1.5-7B", layout(tp=2))
"""Qwen 1.5 7B full fine-tuning, 8 x H100 80GB: 46 GB each, TP2."""
qwen15_14b_finetune_config = finetune_recipe("Qwen/Qwen1.5-14B", layout(tp=4))
"""Qwen 1.5 14B full fine-tuning, 8 x H100 80GB: 51 GB each, TP4."""
qwen15_32b_finetune_config = finetune_recipe("Qwen/Qwen1.5-32B", layout(tp=8))
"""Qwen 1.5 32B full fine-tuning, 16 x H100 80GB: 58 GB each, TP8."""
qwen15_72b_finetune_config = finetune_recipe(QWEN15_72B, layout(tp=8, pp=2))
"""Qwen 1.5 72B full fine-tuning, 32 x H100 80GB: 68 GB each, TP8 PP2."""
qwen15_moe_a2p7b_finetune_config = finetune_recipe("Qwen/Qwen1.5-MoE-A2.7B", layout(ep=4))
"""Qwen 1.5 MoE A2.7B full fine-tuning, 8 x H100 80GB: 67 GB each, EP4."""
