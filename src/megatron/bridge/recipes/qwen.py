# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Qwen family."""

from megatron.bridge.recipes.builders import dpo_recipe, finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.options import FP8, LENGTH_16K, LENGTH_64K, LENGTH_128K, MXFP8, PretrainOptions, layout

# Qwen 1.5. Learning rates are our own: none are published.

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

# Qwen 2. Learning rates are our own: none are published.

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

# Qwen 2.5, whose config is that of Qwen 2. Learning rates are our own: none are published.

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

# Qwen2-VL and Qwen2.5-VL. Learning rates are our own.
#
# The memory is that of samples that consist of images, which are shared out evenly over tensor-parallel ranks.

qwen2_vl_2b_finetune_config = finetune_recipe("Qwen/Qwen2-VL-2B-Instruct", lr=1e-5)
"""Qwen2-VL 2B full fine-tuning, 8 x H100 80GB: 58 GB each, no model parallelism."""
qwen25_vl_3b_finetune_config = finetune_recipe("Qwen/Qwen2.5-VL-3B-Instruct", layout(tp=2), lr=1e-5)
"""Qwen2.5-VL 3B full fine-tuning, 8 x H100 80GB: 45 GB each, TP2."""
qwen25_vl_7b_finetune_config = finetune_recipe("Qwen/Qwen2.5-VL-7B-Instruct", layout(tp=2))
"""Qwen2.5-VL 7B full fine-tuning, 8 x H100 80GB: 68 GB each, TP2."""
qwen25_vl_32b_finetune_config = finetune_recipe("Qwen/Qwen2.5-VL-32B-Instruct", layout(tp=8))
"""Qwen2.5-VL 32B full fine-tuning, 32 x H100 80GB: 56 GB each, TP8."""
qwen25_vl_72b_finetune_config = finetune_recipe("Qwen/Qwen2.5-VL-72B-Instruct", layout(tp=8, pp=4))
"""Qwen2.5-VL 72B full fine-tuning, 64 x H100 80GB: 67 GB each, TP8 PP4."""

# Qwen 3, dense. Learning rates are our own: none are published.

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

# Qwen 3 with experts. Learning rates are our own: none are published.
#
# The 94 layers of 235B-A22B do not divide evenly into stages; with the embedding and the loss they count as 96.

QWEN3_30B_A3B = "Qwen/Qwen3-30B-A3B"
QWEN3_235B_A22B = "Qwen/Qwen3-235B-A22B"
_PRETRAIN_235B: PretrainOptions = {
    "seq_length": 4096,
    "global_batch_size": 1024,
    "lr": 1.5e-4,
    "min_lr": 1.5e-6,
    "embedding_and_loss_are_layers": True,
}
_PRETRAIN_30B: PretrainOptions = {"seq_length": 4096, "lr": 3e-4}

qwen3_30b_a3b_pretrain_config = pretrain_recipe(QWEN3_30B_A3B, _PRETRAIN_30B, layout(tp=2, ep=8, etp=1))
"""Qwen 3 30B-A3B pretraining, 16 x H100 80GB: 63 GB each, TP2 EP8."""
qwen3_235b_a22b_pretrain_config = pretrain_recipe(
    QWEN3_235B_A22B, _PRETRAIN_235B, layout(tp=4, pp=8, vp=4, ep=8, etp=1)
)
"""Qwen 3 235B-A22B pretraining, 256 x H100 80GB: 62 GB each, TP4 PP8 EP8."""
qwen3_30b_a3b_fp8_pretrain_config = pretrain_recipe(QWEN3_30B_A3B, _PRETRAIN_30B, FP8, layout(tp=4, ep=8, etp=1))
"""Qwen 3 30B-A3B pretraining in FP8, 16 x H100 80GB: 62 GB each, TP4 EP8."""
qwen3_30b_a3b_mxfp8_pretrain_config = pretrain_recipe(QWEN3_30B_A3B, _PRETRAIN_30B, MXFP8, layout(ep=4))
"""Qwen 3 30B-A3B pretraining in MXFP8, 8 x B200 180GB: 142 GB each, EP4."""
qwen3_235b_a22b_fp8_pretrain_config = pretrain_recipe(
    QWEN3_235B_A22B, _PRETRAIN_235B, FP8, layout(tp=4, pp=8, vp=4, ep=8, etp=1)
)
"""Qwen 3 235B-A22B pretraining in FP8, 256 x H100 80GB: 70 GB each, TP4 PP8 EP8."""
qwen3_235b_a22b_mxfp8_pretrain_config = pretrain_recipe(
    QWEN3_235B_A22B, _PRETRAIN_235B, MXFP8, layout(tp=2, pp=4, vp=8, ep=8, etp=1)
)
"""Qwen 3 235B-A22B pretraining in MXFP8, 128 x B200 180GB: 137 GB each, TP2 PP4 EP8."""

qwen3_30b_a3b_finetune_config = finetune_recipe(QWEN3_30B_A3B, layout(tp=2, ep=8, etp=1))
"""Qwen 3 30B-A3B full fine-tuning, 16 x H100 80GB: 63 GB each, TP2 EP8."""
qwen3_235b_a22b_finetune_config = finetune_recipe(
    QWEN3_235B_A22B, layout(tp=8, pp=8, vp=4, ep=8, etp=1), embedding_and_loss_are_layers=True
)
"""Qwen 3 235B-A22B full fine-tuning, 128 x H100 80GB: 61 GB each, TP8 PP8 EP8."""

# Qwen3-Next and the text model of Qwen3.5: gated delta nets and attention. Learning rates are our own.

QWEN3_NEXT_80B_A3B = "Qwen/Qwen3-Next-80B-A3B-Instruct"
QWEN35_35B_A3B = "Qwen/Qwen3.5-35B-A3B"

qwen3_next_80b_a3b_pretrain_config = pretrain_recipe(
    QWEN3_NEXT_80B_A3B, layout(tp=2, pp=2, ep=8, etp=1), seq_length=4096, global_batch_size=1024, lr=3e-4
)
"""Qwen 3 Next 80B-A3B pretraining, 64 x H100 80GB: 67 GB each, TP2 PP2 EP8."""
qwen35_9b_pretrain_config = pretrain_recipe("Qwen/Qwen3.5-9B", layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen3.5 9B (text) pretraining, 16 x H100 80GB: 50 GB each, TP2."""
qwen35_35b_a3b_pretrain_config = pretrain_recipe(QWEN35_35B_A3B, layout(tp=2, ep=8, etp=1), seq_length=4096, lr=3e-4)
"""Qwen3.5 35B-A3B (text) pretraining, 32 x H100 80GB: 61 GB each, TP2 EP8."""

qwen3_next_80b_a3b_finetune_config = finetune_recipe(QWEN3_NEXT_80B_A3B, layout(tp=2, pp=2, ep=8, etp=1))
"""Qwen 3 Next 80B-A3B full fine-tuning, 64 x H100 80GB: 67 GB each, TP2 PP2 EP8."""
qwen35_9b_finetune_config = finetune_recipe("Qwen/Qwen3.5-9B", layout(tp=2))
"""Qwen3.5 9B (text) full fine-tuning, 8 x H100 80GB: 56 GB each, TP2."""
qwen35_35b_a3b_finetune_config = finetune_recipe(QWEN35_35B_A3B, layout(tp=2, ep=8, etp=1))
"""Qwen3.5 35B-A3B (text) full fine-tuning, 32 x H100 80GB: 61 GB each, TP2 EP8."""

# Qwen3-VL, dense and mixture of experts. Learning rates are our own.
#
# The memory is that of samples that consist of images, which are shared out evenly over tensor-parallel ranks.

QWEN3_VL_8B, QWEN3_VL_30B_A3B = "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"
QWEN3_VL_235B_A22B = "Qwen/Qwen3-VL-235B-A22B-Instruct"

qwen3_vl_8b_pretrain_config = pretrain_recipe(QWEN3_VL_8B, layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen3-VL 8B pretraining, 8 x H100 80GB: 64 GB each, TP2."""
qwen3_vl_30b_a3b_pretrain_config = pretrain_recipe(
    QWEN3_VL_30B_A3B, layout(tp=4, ep=8, etp=1), seq_length=4096, lr=3e-4
)
"""Qwen3-VL 30B-A3B pretraining, 16 x H100 80GB: 64 GB each, TP4 EP8."""
# two virtual stages, because the first chunk must hold the three layers that features of images are added behind
qwen3_vl_235b_a22b_pretrain_config = pretrain_recipe(
    QWEN3_VL_235B_A22B,
    layout(tp=8, pp=8, vp=2, ep=8, etp=1),
    seq_length=4096,
    lr=3e-4,
    embedding_and_loss_are_layers=True,
    recompute=["vision_model"],
)
"""Qwen3-VL 235B-A22B pretraining, 128 x H100 80GB: 70 GB each, TP8 PP8 EP8."""

qwen3_vl_8b_finetune_config = finetune_recipe(QWEN3_VL_8B, layout(tp=2))
"""Qwen3-VL 8B full fine-tuning, 8 x H100 80GB: 64 GB each, TP2."""
qwen3_vl_30b_a3b_finetune_config = finetune_recipe(QWEN3_VL_30B_A3B, layout(tp=4, ep=8, etp=1))
"""Qwen3-VL 30B-A3B full fine-tuning, 16 x H100 80GB: 64 GB each, TP4 EP8."""
qwen3_vl_235b_a22b_finetune_config = finetune_recipe(
    QWEN3_VL_235B_A22B,
    layout(tp=8, pp=8, vp=2, ep=8, etp=1),
    embedding_and_loss_are_layers=True,
    recompute=["vision_model"],
)
"""Qwen3-VL 235B-A22B full fine-tuning, 128 x H100 80GB: 70 GB each, TP8 PP8 EP8."""

name_functions(__name__)
