# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import dpo_recipe, finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import FP8, MXFP8, layout

QWEN3_600M = "Qwen/Qwen3-0.6B"
QWEN3_1P7B = "Qwen/Qwen3-1.7B"
QWEN3_8B = "Qwen/Qwen3-8B"

qwen3_600m_pretrain_config = pretrain_recipe(QWEN3_600M, seq_length=4096, micro_batch_size=2, lr=1e-3, min_lr=1e-5)
"""Qwen 3 0.6B pretraining, 8 x H100 80GB: 21 GB each, no model parallelism."""
qwen3_1p7b_pretrain_config = pretrain_recipe(QWEN3_1P7B, seq_length=4096, micro_batch_size=2, lr=5e-4, min_lr=5e-6)
"""Qwen 3 1.7B pretraining, 8 x H100 80GB: 36 GB each, no model parallelism."""
qwen3_4b_pretrain_config = pretrain_recipe("Qwen/Qwen3-4B", seq_length=4096, lr=3e-4)
"""Qwen 3 4B pretraining, 8 x H100 80GB: 51 GB each, no model parallelism."""
qwen3_8b_pretrain_config = pretrain_recipe(QWEN3_8B, layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen 3 8B pretraining, 8 x H100 80GB: 49 GB each, TP2."""
qwen3_14b_pretrain_config = pretrain_recipe("Qwen/Qwen3-14B", layout(tp=4), seq_length=4096, lr=3e-4)
"""Qwen 3 14B pretraining, 16 x H100 80GB: 42 GB each, TP4."""
qwen3_32b_pretrain_config = pretrain_recipe("Qwen/Qwen3-32B", layout(tp=8), seq_length=4096, lr=2e-4)
"""Qwen 3 32B pretraining, 32 x H100 80GB: 46 GB each, TP8."""
qwen3_8b_fp8_pretrain_config = pretrain_recipe(QWEN3_8B, FP8, layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen 3 8B pretraining in FP8, 8 x H100 80GB: 56 GB each, TP2."""
qwen3_8b_mxfp8_pretrain_config = pretrain_recipe(QWEN3_8B, MXFP8, seq_length=4096, lr=3e-4)
"""Qwen 3 8B pretraining in MXFP8, 8 x B200 180GB: 100 GB each, no model parallelism."""

qwen3_600m_finetune_config = finetune_recipe(QWEN3_600M, lr=1e-5)
"""Qwen 3 0.6B full fine-tuning, 1 x H100 80GB: 19 GB, no model parallelism."""
qwen3_1p7b_finetune_config = finetune_recipe(QWEN3_1P7B, lr=1e-5)
"""Qwen 3 1.7B full fine-tuning, 1 x H100 80GB: 43 GB, no model parallelism."""
qwen3_4b_finetune_config = finetune_recipe("Qwen/Qwen3-4B", lr=1e-5)
"""Qwen 3 4B full fine-tuning, 8 x H100 80GB: 51 GB each, no model parallelism."""
qwen3_8b_dpo_config = dpo_recipe(QWEN3_8B, layout(tp=2))
"""Qwen 3 8B DPO, 8 x H100 80GB: 60 GB each, TP2."""
qwen3_8b_finetune_config = finetune_recipe(QWEN3_8B, layout(tp=2))
"""Qwen 3 8B full fine-tuning, 8 x H100 80GB: 49 GB each, TP2."""
qwen3_14b_finetune_config = finetune_recipe("Qwen/Qwen3-14B", layout(tp=4))
"""Qwen 3 14B full fine-tuning, 8 x H100 80GB: 53 GB each, TP4."""
qwen3_32b_finetune_config = finetune_recipe("Qwen/Qwen3-32B", layout(tp=8))
"""Qwen 3 32B full fine-tuning, 16 x H100 80GB: 59 GB each, TP8."""
