# SPDX-License-Identifier: Apache-2.0
"""Qwen 2.5, whose config is that of Qwen 2. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import LENGTH_16K, LENGTH_64K, LENGTH_128K, layout

QWEN25_500M = "Qwen/Qwen2.5-0.5B"
QWEN25_1P5B = "Qwen/Qwen2.5-1.5B"
QWEN25_7B = "Qwen/Qwen2.5-7B"
QWEN25_72B = "Qwen/Qwen2.5-72B"

qwen25_500m_pretrain_config = pretrain_recipe(QWEN25_500M, seq_length=4096, micro_batch_size=2, lr=1e-3, min_lr=1e-5)
"""Qwen 2.5 0.5B pretraining, 8 x H100 80GB: 18 GB each, no model parallelism."""
qwen25_1p5b_pretrain_config = pretrain_recipe(QWEN25_1P5B, seq_length=4096, micro_batch_size=2, lr=5e-4, min_lr=5e-6)
"""Qwen 2.5 1.5B pretraining, 8 x H100 80GB: 35 GB each, no model parallelism."""
qwen25_3b_pretrain_config = pretrain_recipe("Qwen/Qwen2.5-3B", seq_length=4096, lr=3e-4)
"""Qwen 2.5 3B pretraining, 8 x H100 80GB: 40 GB each, no model parallelism."""
qwen25_7b_pretrain_config = pretrain_recipe(QWEN25_7B, layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen 2.5 7B pretraining, 8 x H100 80GB: 46 GB each, TP2."""
qwen25_14b_pretrain_config = pretrain_recipe("Qwen/Qwen2.5-14B", layout(tp=4), seq_length=4096, lr=3e-4)
"""Qwen 2.5 14B pretraining, 16 x H100 80GB: 42 GB each, TP4."""
qwen25_32b_pretrain_config = pretrain_recipe("Qwen/Qwen2.5-32B", layout(tp=8), seq_length=4096, lr=2e-4)
"""Qwen 2.5 32B pretraining, 32 x H100 80GB: 46 GB each, TP8."""
qwen25_72b_pretrain_config = pretrain_recipe(QWEN25_72B, layout(tp=8, pp=2), seq_length=4096, lr=1.5e-4, min_lr=1.5e-6)
"""Qwen 2.5 72B pretraining, 64 x H100 80GB: 54 GB each, TP8 PP2."""
qwen25_7b_16k_pretrain_config = pretrain_recipe(QWEN25_7B, LENGTH_16K, layout(tp=4), lr=3e-4)
"""Qwen 2.5 7B pretraining on 16k tokens, 16 x H100 80GB: 39 GB each, TP4."""
qwen25_7b_64k_pretrain_config = pretrain_recipe(QWEN25_7B, LENGTH_64K, layout(tp=4, cp=2), lr=3e-4)
"""Qwen 2.5 7B pretraining on 64k tokens, 32 x H100 80GB: 59 GB each, TP4 CP2."""
qwen25_7b_128k_pretrain_config = pretrain_recipe(QWEN25_7B, LENGTH_128K, layout(tp=4, cp=4), lr=3e-4)
"""Qwen 2.5 7B pretraining on 128k tokens, 64 x H100 80GB: 58 GB each, TP4 CP4."""

qwen25_500m_finetune_config = finetune_recipe(QWEN25_500M, lr=1e-5)
"""Qwen 2.5 0.5B full fine-tuning, 1 x H100 80GB: 16 GB, no model parallelism."""
qwen25_1p5b_finetune_config = finetune_recipe(QWEN25_1P5B, lr=1e-5)
"""Qwen 2.5 1.5B full fine-tuning, 1 x H100 80GB: 40 GB, no model parallelism."""
qwen25_3b_finetune_config = finetune_recipe("Qwen/Qwen2.5-3B", lr=1e-5)
"""Qwen 2.5 3B full fine-tuning, 8 x H100 80GB: 40 GB each, no model parallelism."""
qwen25_7b_finetune_config = finetune_recipe(QWEN25_7B, layout(tp=2))
"""Qwen 2.5 7B full fine-tuning, 8 x H100 80GB: 46 GB each, TP2."""
qwen25_14b_finetune_config = finetune_recipe("Qwen/Qwen2.5-14B", layout(tp=4))
"""Qwen 2.5 14B full fine-tuning, 8 x H100 80GB: 53 GB each, TP4."""
qwen25_32b_finetune_config = finetune_recipe("Qwen/Qwen2.5-32B", layout(tp=8))
"""Qwen 2.5 32B full fine-tuning, 16 x H100 80GB: 58 GB each, TP8."""
qwen25_72b_finetune_config = finetune_recipe(QWEN25_72B, layout(tp=8, pp=2))
"""Qwen 2.5 72B full fine-tuning, 32 x H100 80GB: 68 GB each, TP8 PP2."""
