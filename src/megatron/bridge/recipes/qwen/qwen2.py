# SPDX-License-Identifier: Apache-2.0
"""Qwen 2. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

QWEN2_500M = "Qwen/Qwen2-0.5B"
QWEN2_1P5B = "Qwen/Qwen2-1.5B"
QWEN2_72B = "Qwen/Qwen2-72B"

qwen2_500m_pretrain_config = pretrain_recipe(QWEN2_500M, seq_length=4096, micro_batch_size=2, lr=1e-3, min_lr=1e-5)
"""Qwen 2 0.5B pretraining, 8 x H100 80GB: 18 GB each, no model parallelism."""
qwen2_1p5b_pretrain_config = pretrain_recipe(QWEN2_1P5B, seq_length=4096, micro_batch_size=2, lr=5e-4, min_lr=5e-6)
"""Qwen 2 1.5B pretraining, 8 x H100 80GB: 35 GB each, no model parallelism."""
qwen2_7b_pretrain_config = pretrain_recipe("Qwen/Qwen2-7B", layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen 2 7B pretraining, 8 x H100 80GB: 46 GB each, TP2."""
qwen2_72b_pretrain_config = pretrain_recipe(QWEN2_72B, layout(tp=8, pp=2), seq_length=4096, lr=1.5e-4, min_lr=1.5e-6)
"""Qwen 2 72B pretraining, 64 x H100 80GB: 54 GB each, TP8 PP2."""
qwen2_57b_a14b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen2-57B-A14B", layout(tp=4, pp=2, ep=8, etp=1), seq_length=4096, lr=2e-4
)
"""Qwen 2 57B-A14B pretraining, 32 x H100 80GB: 57 GB each, TP4 PP2 EP8."""

qwen2_500m_finetune_config = finetune_recipe(QWEN2_500M, lr=1e-5)
"""Qwen 2 0.5B full fine-tuning, 1 x H100 80GB: 16 GB, no model parallelism."""
qwen2_1p5b_finetune_config = finetune_recipe(QWEN2_1P5B, lr=1e-5)
"""Qwen 2 1.5B full fine-tuning, 1 x H100 80GB: 40 GB, no model parallelism."""
qwen2_7b_finetune_config = finetune_recipe("Qwen/Qwen2-7B", layout(tp=2))
"""Qwen 2 7B full fine-tuning, 8 x H100 80GB: 46 GB each, TP2."""
qwen2_72b_finetune_config = finetune_recipe(QWEN2_72B, layout(tp=8, pp=2))
"""Qwen 2 72B full fine-tuning, 32 x H100 80GB: 68 GB each, TP8 PP2."""
qwen2_57b_a14b_finetune_config = finetune_recipe("Qwen/Qwen2-57B-A14B", layout(tp=4, pp=2, ep=8, etp=1))
"""Qwen 2 57B-A14B full fine-tuning, 32 x H100 80GB: 57 GB each, TP4 PP2 EP8."""
