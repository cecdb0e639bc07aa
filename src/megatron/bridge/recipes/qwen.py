# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Qwen family."""

from megatron.bridge.recipes.builders import (
    dpo_recipe,
    finetune_recipe,
    grpo_recipe,
    pretrain_recipe,
    qlora_recipe,
)
from megatron.bridge.recipes.options import (
    FP8,
    LENGTH_16K,
    LENGTH_64K,
    LENGTH_128K,
    MXFP8,
    PretrainOptions,
    layout,
)
from megatron.bridge.recipes.sizes import TEXT_MODEL

# Qwen 1.5. Learning rates are our own: none are published.

QWEN15_500M = "Qwen/Qwen1.5-0.5B"
QWEN15_1P8B = "Qwen/Qwen1.5-1.8B"
QWEN15_72B = "Qwen/Qwen1.5-72B"

qwen15_500m_pretrain_config = pretrain_recipe(
    QWEN15_500M,
    what="Qwen 1.5 0.5B pretraining",
    gpus=8,
    memory_gb=16,
    seq_length=4096,
    micro_batch_size=2,
    lr=1e-3,
    min_lr=1e-5,
)
qwen15_1p8b_pretrain_config = pretrain_recipe(
    QWEN15_1P8B,
    what="Qwen 1.5 1.8B pretraining",
    gpus=8,
    memory_gb=34,
    seq_length=4096,
    micro_batch_size=2,
    lr=5e-4,
    min_lr=5e-6,
)
qwen15_4b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen1.5-4B",
    what="Qwen 1.5 4B pretraining",
    gpus=8,
    memory_gb=48,
    seq_length=4096,
    lr=3e-4,
)
qwen15_7b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen1.5-7B",
    layout(tp=2),
    what="Qwen 1.5 7B pretraining",
    gpus=8,
    memory_gb=46,
    seq_length=4096,
    lr=3e-4,
)
qwen15_14b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen1.5-14B",
    layout(tp=2),
    what="Qwen 1.5 14B pretraining",
    gpus=16,
    memory_gb=70,
    seq_length=4096,
    lr=3e-4,
)
qwen15_32b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen1.5-32B",
    layout(tp=8),
    what="Qwen 1.5 32B pretraining",
    gpus=32,
    memory_gb=45,
    seq_length=4096,
    lr=2e-4,
)
qwen15_72b_pretrain_config = pretrain_recipe(
    QWEN15_72B,
    layout(tp=8, pp=2),
    what="Qwen 1.5 72B pretraining",
    gpus=64,
    memory_gb=54,
    seq_length=4096,
    lr=1.5e-4,
    min_lr=1.5e-6,
)
qwen15_moe_a2p7b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen1.5-MoE-A2.7B",
    layout(ep=4),
    what="Qwen 1.5 MoE A2.7B pretraining",
    gpus=16,
    memory_gb=56,
    seq_length=4096,
    lr=3e-4,
)

qwen15_500m_finetune_config = finetune_recipe(
    QWEN15_500M, what="Qwen 1.5 0.5B full fine-tuning", gpus=1, memory_gb=15, lr=1e-5
)
qwen15_1p8b_finetune_config = finetune_recipe(
    QWEN15_1P8B, what="Qwen 1.5 1.8B full fine-tuning", gpus=8, memory_gb=24, lr=1e-5
)
qwen15_4b_finetune_config = finetune_recipe(
    "Qwen/Qwen1.5-4B", what="Qwen 1.5 4B full fine-tuning", gpus=8, memory_gb=48, lr=1e-5
)
qwen15_7b_finetune_config = finetune_recipe(
    "Qwen/Qwen1.5-7B", layout(tp=2), what="Qwen 1.5 7B full fine-tuning", gpus=8, memory_gb=46
)
qwen15_14b_finetune_config = finetune_recipe(
    "Qwen/Qwen1.5-14B", layout(tp=4), what="Qwen 1.5 14B full fine-tuning", gpus=8, memory_gb=51
)
qwen15_32b_finetune_config = finetune_recipe(
    "Qwen/Qwen1.5-32B", layout(tp=8), what="Qwen 1.5 32B full fine-tuning", gpus=16, memory_gb=58
)
qwen15_72b_finetune_config = finetune_recipe(
    QWEN15_72B, layout(tp=8, pp=2), what="Qwen 1.5 72B full fine-tuning", gpus=32, memory_gb=68
)
qwen15_moe_a2p7b_finetune_config = finetune_recipe(
    "Qwen/Qwen1.5-MoE-A2.7B",
    layout(ep=4),
    what="Qwen 1.5 MoE A2.7B full fine-tuning",
    gpus=8,
    memory_gb=67,
)

# Qwen 2. Learning rates are our own: none are published.

QWEN2_500M = "Qwen/Qwen2-0.5B"
QWEN2_1P5B = "Qwen/Qwen2-1.5B"
QWEN2_72B = "Qwen/Qwen2-72B"

qwen2_500m_pretrain_config = pretrain_recipe(
    QWEN2_500M,
    what="Qwen 2 0.5B pretraining",
    gpus=8,
    memory_gb=18,
    seq_length=4096,
    micro_batch_size=2,
    lr=1e-3,
    min_lr=1e-5,
)
qwen2_1p5b_pretrain_config = pretrain_recipe(
    QWEN2_1P5B,
    what="Qwen 2 1.5B pretraining",
    gpus=8,
    memory_gb=35,
    seq_length=4096,
    micro_batch_size=2,
    lr=5e-4,
    min_lr=5e-6,
)
qwen2_7b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen2-7B",
    layout(tp=2),
    what="Qwen 2 7B pretraining",
    gpus=8,
    memory_gb=46,
    seq_length=4096,
    lr=3e-4,
)
qwen2_72b_pretrain_config = pretrain_recipe(
    QWEN2_72B,
    layout(tp=8, pp=2),
    what="Qwen 2 72B pretraining",
    gpus=64,
    memory_gb=54,
    seq_length=4096,
    lr=1.5e-4,
    min_lr=1.5e-6,
)
qwen2_57b_a14b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen2-57B-A14B",
    layout(tp=4, pp=2, ep=8, etp=1),
    what="Qwen 2 57B-A14B pretraining",
    gpus=32,
    memory_gb=57,
    seq_length=4096,
    lr=2e-4,
)

qwen2_500m_finetune_config = finetune_recipe(
    QWEN2_500M, what="Qwen 2 0.5B full fine-tuning", gpus=1, memory_gb=16, lr=1e-5
)
qwen2_1p5b_finetune_config = finetune_recipe(
    QWEN2_1P5B, what="Qwen 2 1.5B full fine-tuning", gpus=1, memory_gb=40, lr=1e-5
)
qwen2_7b_finetune_config = finetune_recipe(
    "Qwen/Qwen2-7B", layout(tp=2), what="Qwen 2 7B full fine-tuning", gpus=8, memory_gb=46
)
qwen2_72b_finetune_config = finetune_recipe(
    QWEN2_72B, layout(tp=8, pp=2), what="Qwen 2 72B full fine-tuning", gpus=32, memory_gb=68
)
qwen2_57b_a14b_finetune_config = finetune_recipe(
    "Qwen/Qwen2-57B-A14B",
    layout(tp=4, pp=2, ep=8, etp=1),
    what="Qwen 2 57B-A14B full fine-tuning",
    gpus=32,
    memory_gb=57,
)

# Qwen 2.5, with the config of Qwen 2. Learning rates are our own: none are published.

QWEN25_500M = "Qwen/Qwen2.5-0.5B"
QWEN25_1P5B = "Qwen/Qwen2.5-1.5B"
QWEN25_7B = "Qwen/Qwen2.5-7B"
QWEN25_72B = "Qwen/Qwen2.5-72B"

qwen25_500m_pretrain_config = pretrain_recipe(
    QWEN25_500M,
    what="Qwen 2.5 0.5B pretraining",
    gpus=8,
    memory_gb=18,
    seq_length=4096,
    micro_batch_size=2,
    lr=1e-3,
    min_lr=1e-5,
)
qwen25_1p5b_pretrain_config = pretrain_recipe(
    QWEN25_1P5B,
    what="Qwen 2.5 1.5B pretraining",
    gpus=8,
    memory_gb=35,
    seq_length=4096,
    micro_batch_size=2,
    lr=5e-4,
    min_lr=5e-6,
)
qwen25_3b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen2.5-3B",
    what="Qwen 2.5 3B pretraining",
    gpus=8,
    memory_gb=40,
    seq_length=4096,
    lr=3e-4,
)
qwen25_7b_pretrain_config = pretrain_recipe(
    QWEN25_7B,
    layout(tp=2),
    what="Qwen 2.5 7B pretraining",
    gpus=8,
    memory_gb=46,
    seq_length=4096,
    lr=3e-4,
)
qwen25_14b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen2.5-14B",
    layout(tp=4),
    what="Qwen 2.5 14B pretraining",
    gpus=16,
    memory_gb=42,
    seq_length=4096,
    lr=3e-4,
)
qwen25_32b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen2.5-32B",
    layout(tp=8),
    what="Qwen 2.5 32B pretraining",
    gpus=32,
    memory_gb=46,
    seq_length=4096,
    lr=2e-4,
)
qwen25_72b_pretrain_config = pretrain_recipe(
    QWEN25_72B,
    layout(tp=8, pp=2),
    what="Qwen 2.5 72B pretraining",
    gpus=64,
    memory_gb=54,
    seq_length=4096,
    lr=1.5e-4,
    min_lr=1.5e-6,
)
qwen25_7b_16k_pretrain_config = pretrain_recipe(
    QWEN25_7B,
    LENGTH_16K,
    layout(tp=4),
    what="Qwen 2.5 7B pretraining on 16k tokens",
    gpus=16,
    memory_gb=39,
    lr=3e-4,
)
qwen25_7b_64k_pretrain_config = pretrain_recipe(
    QWEN25_7B,
    LENGTH_64K,
    layout(tp=4, cp=2),
    what="Qwen 2.5 7B pretraining on 64k tokens",
    gpus=32,
    memory_gb=61,
    lr=3e-4,
)
qwen25_7b_128k_pretrain_config = pretrain_recipe(
    QWEN25_7B,
    LENGTH_128K,
    layout(tp=4, cp=4),
    what="Qwen 2.5 7B pretraining on 128k tokens",
    gpus=64,
    memory_gb=62,
    lr=3e-4,
)

qwen25_500m_finetune_config = finetune_recipe(
    QWEN25_500M, what="Qwen 2.5 0.5B full fine-tuning", gpus=1, memory_gb=16, lr=1e-5
)
qwen25_1p5b_finetune_config = finetune_recipe(
    QWEN25_1P5B, what="Qwen 2.5 1.5B full fine-tuning", gpus=1, memory_gb=40, lr=1e-5
)
qwen25_3b_finetune_config = finetune_recipe(
    "Qwen/Qwen2.5-3B", what="Qwen 2.5 3B full fine-tuning", gpus=8, memory_gb=40, lr=1e-5
)
qwen25_7b_finetune_config = finetune_recipe(
    QWEN25_7B, layout(tp=2), what="Qwen 2.5 7B full fine-tuning", gpus=8, memory_gb=46
)
qwen25_14b_finetune_config = finetune_recipe(
    "Qwen/Qwen2.5-14B", layout(tp=4), what="Qwen 2.5 14B full fine-tuning", gpus=8, memory_gb=53
)
qwen25_32b_finetune_config = finetune_recipe(
    "Qwen/Qwen2.5-32B", layout(tp=8), what="Qwen 2.5 32B full fine-tuning", gpus=16, memory_gb=58
)
qwen25_72b_finetune_config = finetune_recipe(
    QWEN25_72B, layout(tp=8, pp=2), what="Qwen 2.5 72B full fine-tuning", gpus=32, memory_gb=68
)

# Qwen2-VL and Qwen2.5-VL. Learning rates are our own.
#
# The memory is for samples that consist of images, which are distributed evenly over tensor-parallel ranks.

qwen2_vl_2b_finetune_config = finetune_recipe(
    "Qwen/Qwen2-VL-2B-Instruct", what="Qwen2-VL 2B full fine-tuning", gpus=8, memory_gb=58, lr=1e-5
)
qwen25_vl_3b_finetune_config = finetune_recipe(
    "Qwen/Qwen2.5-VL-3B-Instruct",
    layout(tp=2),
    what="Qwen2.5-VL 3B full fine-tuning",
    gpus=8,
    memory_gb=46,
    lr=1e-5,
)
qwen25_vl_7b_finetune_config = finetune_recipe(
    "Qwen/Qwen2.5-VL-7B-Instruct",
    layout(tp=2),
    what="Qwen2.5-VL 7B full fine-tuning",
    gpus=8,
    memory_gb=68,
)
qwen25_vl_32b_finetune_config = finetune_recipe(
    "Qwen/Qwen2.5-VL-32B-Instruct",
    layout(tp=8),
    what="Qwen2.5-VL 32B full fine-tuning",
    gpus=32,
    memory_gb=56,
)
qwen25_vl_72b_finetune_config = finetune_recipe(
    "Qwen/Qwen2.5-VL-72B-Instruct",
    layout(tp=8, pp=4),
    what="Qwen2.5-VL 72B full fine-tuning",
    gpus=64,
    memory_gb=66,
)

# Qwen 3, dense. Learning rates are our own: none are published.

QWEN3_600M = "Qwen/Qwen3-0.6B"
QWEN3_1P7B = "Qwen/Qwen3-1.7B"
QWEN3_8B = "Qwen/Qwen3-8B"

qwen3_600m_pretrain_config = pretrain_recipe(
    QWEN3_600M,
    what="Qwen 3 0.6B pretraining",
    gpus=8,
    memory_gb=21,
    seq_length=4096,
    micro_batch_size=2,
    lr=1e-3,
    min_lr=1e-5,
)
qwen3_1p7b_pretrain_config = pretrain_recipe(
    QWEN3_1P7B,
    what="Qwen 3 1.7B pretraining",
    gpus=8,
    memory_gb=36,
    seq_length=4096,
    micro_batch_size=2,
    lr=5e-4,
    min_lr=5e-6,
)
qwen3_4b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen3-4B", what="Qwen 3 4B pretraining", gpus=8, memory_gb=51, seq_length=4096, lr=3e-4
)
qwen3_8b_pretrain_config = pretrain_recipe(
    QWEN3_8B,
    layout(tp=2),
    what="Qwen 3 8B pretraining",
    gpus=8,
    memory_gb=49,
    seq_length=4096,
    lr=3e-4,
)
qwen3_14b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen3-14B",
    layout(tp=4),
    what="Qwen 3 14B pretraining",
    gpus=16,
    memory_gb=42,
    seq_length=4096,
    lr=3e-4,
)
qwen3_32b_pretrain_config = pretrain_recipe(
    "Qwen/Qwen3-32B",
    layout(tp=8),
    what="Qwen 3 32B pretraining",
    gpus=32,
    memory_gb=46,
    seq_length=4096,
    lr=2e-4,
)
qwen3_8b_fp8_pretrain_config = pretrain_recipe(
    QWEN3_8B,
    FP8,
    layout(tp=2),
    what="Qwen 3 8B pretraining in FP8",
    gpus=8,
    memory_gb=56,
    seq_length=4096,
    lr=3e-4,
)
qwen3_8b_mxfp8_pretrain_config = pretrain_recipe(
    QWEN3_8B,
    MXFP8,
    what="Qwen 3 8B pretraining in MXFP8",
    gpus=8,
    gpu_kind="B200 180GB",
    memory_gb=97,
    seq_length=4096,
    lr=3e-4,
)

qwen3_600m_finetune_config = finetune_recipe(
    QWEN3_600M, what="Qwen 3 0.6B full fine-tuning", gpus=1, memory_gb=19, lr=1e-5
)
qwen3_600m_grpo_config = grpo_recipe(QWEN3_600M, what="Qwen 3 0.6B GRPO", gpus=1, memory_gb=15)
qwen3_1p7b_finetune_config = finetune_recipe(
    QWEN3_1P7B, what="Qwen 3 1.7B full fine-tuning", gpus=1, memory_gb=43, lr=1e-5
)
qwen3_4b_finetune_config = finetune_recipe(
    "Qwen/Qwen3-4B", what="Qwen 3 4B full fine-tuning", gpus=8, memory_gb=51, lr=1e-5
)
qwen3_8b_dpo_config = dpo_recipe(QWEN3_8B, layout(tp=2), what="Qwen 3 8B DPO", gpus=8, memory_gb=60)
qwen3_8b_finetune_config = finetune_recipe(
    QWEN3_8B, layout(tp=2), what="Qwen 3 8B full fine-tuning", gpus=8, memory_gb=49
)
qwen3_14b_finetune_config = finetune_recipe(
    "Qwen/Qwen3-14B", layout(tp=4), what="Qwen 3 14B full fine-tuning", gpus=8, memory_gb=53
)
qwen3_32b_finetune_config = finetune_recipe(
    "Qwen/Qwen3-32B", layout(tp=8), what="Qwen 3 32B full fine-tuning", gpus=16, memory_gb=59
)

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

qwen3_30b_a3b_pretrain_config = pretrain_recipe(
    QWEN3_30B_A3B,
    _PRETRAIN_30B,
    layout(tp=2, ep=8, etp=1),
    what="Qwen 3 30B-A3B pretraining",
    gpus=16,
    memory_gb=63,
)
qwen3_235b_a22b_pretrain_config = pretrain_recipe(
    QWEN3_235B_A22B,
    _PRETRAIN_235B,
    layout(tp=4, pp=8, vp=4, ep=8, etp=1),
    what="Qwen 3 235B-A22B pretraining",
    gpus=256,
    memory_gb=63,
)
qwen3_30b_a3b_fp8_pretrain_config = pretrain_recipe(
    QWEN3_30B_A3B,
    _PRETRAIN_30B,
    FP8,
    layout(tp=2, ep=8, etp=1),
    what="Qwen 3 30B-A3B pretraining in FP8",
    gpus=16,
    memory_gb=72,
)
qwen3_30b_a3b_mxfp8_pretrain_config = pretrain_recipe(
    QWEN3_30B_A3B,
    _PRETRAIN_30B,
    MXFP8,
    layout(ep=4),
    what="Qwen 3 30B-A3B pretraining in MXFP8",
    gpus=8,
    gpu_kind="B200 180GB",
    memory_gb=138,
)
qwen3_235b_a22b_fp8_pretrain_config = pretrain_recipe(
    QWEN3_235B_A22B,
    _PRETRAIN_235B,
    FP8,
    layout(tp=4, pp=8, vp=4, ep=8, etp=1),
    what="Qwen 3 235B-A22B pretraining in FP8",
    gpus=256,
    memory_gb=71,
)
qwen3_235b_a22b_mxfp8_pretrain_config = pretrain_recipe(
    QWEN3_235B_A22B,
    _PRETRAIN_235B,
    MXFP8,
    layout(tp=2, pp=4, vp=8, ep=8, etp=1),
    what="Qwen 3 235B-A22B pretraining in MXFP8",
    gpus=128,
    gpu_kind="B200 180GB",
    memory_gb=128,
)

qwen3_30b_a3b_finetune_config = finetune_recipe(
    QWEN3_30B_A3B,
    layout(tp=2, ep=8, etp=1),
    what="Qwen 3 30B-A3B full fine-tuning",
    gpus=16,
    memory_gb=63,
)
qwen3_30b_a3b_qlora_config = qlora_recipe(QWEN3_30B_A3B, what="Qwen 3 30B-A3B QLoRA", memory_gb=58)
qwen3_30b_a3b_grpo_config = grpo_recipe(
    QWEN3_30B_A3B, layout(ep=8), what="Qwen 3 30B-A3B GRPO", gpus=16, memory_gb=68
)
qwen3_235b_a22b_finetune_config = finetune_recipe(
    QWEN3_235B_A22B,
    layout(tp=8, pp=8, vp=4, ep=8, etp=1),
    what="Qwen 3 235B-A22B full fine-tuning",
    gpus=128,
    memory_gb=62,
    embedding_and_loss_are_layers=True,
)

# Qwen3-Next and the text model of Qwen3.5: gated delta nets and attention. Learning rates are our own.

QWEN3_NEXT_80B_A3B = "Qwen/Qwen3-Next-80B-A3B-Instruct"
QWEN35_9B = "Qwen/Qwen3.5-9B"
QWEN35_35B_A3B = "Qwen/Qwen3.5-35B-A3B"

qwen3_next_80b_a3b_pretrain_config = pretrain_recipe(
    QWEN3_NEXT_80B_A3B,
    layout(tp=2, pp=2, ep=8, etp=1),
    what="Qwen 3 Next 80B-A3B pretraining",
    gpus=64,
    memory_gb=67,
    seq_length=4096,
    global_batch_size=1024,
    lr=3e-4,
)
qwen35_9b_pretrain_config = pretrain_recipe(
    QWEN35_9B + TEXT_MODEL,
    layout(tp=2),
    what="Qwen3.5 9B (text) pretraining",
    gpus=16,
    memory_gb=50,
    seq_length=4096,
    lr=3e-4,
)
qwen35_35b_a3b_pretrain_config = pretrain_recipe(
    QWEN35_35B_A3B + TEXT_MODEL,
    layout(tp=2, ep=8, etp=1),
    what="Qwen3.5 35B-A3B (text) pretraining",
    gpus=32,
    memory_gb=61,
    seq_length=4096,
    lr=3e-4,
)

qwen3_next_80b_a3b_finetune_config = finetune_recipe(
    QWEN3_NEXT_80B_A3B,
    layout(tp=2, pp=2, ep=8, etp=1),
    what="Qwen 3 Next 80B-A3B full fine-tuning",
    gpus=64,
    memory_gb=67,
)
qwen35_9b_finetune_config = finetune_recipe(
    QWEN35_9B + TEXT_MODEL,
    layout(tp=2),
    what="Qwen3.5 9B (text) full fine-tuning",
    gpus=8,
    memory_gb=56,
)
qwen35_35b_a3b_finetune_config = finetune_recipe(
    QWEN35_35B_A3B + TEXT_MODEL,
    layout(tp=2, ep=8, etp=1),
    what="Qwen3.5 35B-A3B (text) full fine-tuning",
    gpus=32,
    memory_gb=61,
)

# Qwen3-VL, dense and mixture of experts. Learning rates are our own.
#
# The memory is for samples that consist of images, which are distributed evenly over tensor-parallel ranks.

QWEN3_VL_8B = "Qwen/Qwen3-VL-8B-Instruct"
QWEN3_VL_30B_A3B = "Qwen/Qwen3-VL-30B-A3B-Instruct"
QWEN3_VL_235B_A22B = "Qwen/Qwen3-VL-235B-A22B-Instruct"

qwen3_vl_8b_pretrain_config = pretrain_recipe(
    QWEN3_VL_8B,
    layout(tp=2),
    what="Qwen3-VL 8B pretraining",
    gpus=8,
    memory_gb=64,
    seq_length=4096,
    lr=3e-4,
)
qwen3_vl_30b_a3b_pretrain_config = pretrain_recipe(
    QWEN3_VL_30B_A3B,
    layout(tp=4, ep=8, etp=1),
    what="Qwen3-VL 30B-A3B pretraining",
    gpus=16,
    memory_gb=64,
    seq_length=4096,
    lr=3e-4,
)
# two virtual stages, because the first chunk must hold the three layers whose outputs get features of images
qwen3_vl_235b_a22b_pretrain_config = pretrain_recipe(
    QWEN3_VL_235B_A22B,
    layout(tp=8, pp=8, vp=2, ep=8, etp=1),
    what="Qwen3-VL 235B-A22B pretraining",
    gpus=128,
    memory_gb=71,
    seq_length=4096,
    lr=3e-4,
    embedding_and_loss_are_layers=True,
    recompute=["vision_model"],
)

qwen3_vl_8b_finetune_config = finetune_recipe(
    QWEN3_VL_8B, layout(tp=2), what="Qwen3-VL 8B full fine-tuning", gpus=8, memory_gb=64
)
qwen3_vl_30b_a3b_finetune_config = finetune_recipe(
    QWEN3_VL_30B_A3B,
    layout(tp=4, ep=8, etp=1),
    what="Qwen3-VL 30B-A3B full fine-tuning",
    gpus=16,
    memory_gb=64,
)
qwen3_vl_235b_a22b_finetune_config = finetune_recipe(
    QWEN3_VL_235B_A22B,
    layout(tp=8, pp=8, vp=2, ep=8, etp=1),
    what="Qwen3-VL 235B-A22B full fine-tuning",
    gpus=128,
    memory_gb=71,
    embedding_and_loss_are_layers=True,
    recompute=["vision_model"],
)

# Qwen3.5 and Qwen3.6 with their vision tower. Learning rates are our own.
#
# The memory is for samples that consist of images, which are distributed evenly over tensor-parallel ranks.

qwen35_vl_9b_finetune_config = finetune_recipe(
    QWEN35_9B, layout(tp=2), what="Qwen3.5 VL 9B full fine-tuning", gpus=8, memory_gb=69
)
qwen35_vl_35b_a3b_finetune_config = finetune_recipe(
    QWEN35_35B_A3B,
    layout(tp=2, ep=8, etp=1),
    what="Qwen3.5 VL 35B-A3B full fine-tuning",
    gpus=32,
    memory_gb=65,
    recompute=["vision_model"],
)
qwen36_vl_27b_finetune_config = finetune_recipe(
    "Qwen/Qwen3.6-27B",
    layout(tp=8),
    what="Qwen3.6 VL 27B full fine-tuning",
    gpus=32,
    memory_gb=47,
)
qwen36_vl_35b_a3b_finetune_config = finetune_recipe(
    "Qwen/Qwen3.6-35B-A3B",
    layout(tp=2, ep=8, etp=1),
    what="Qwen3.6 VL 35B-A3B full fine-tuning",
    gpus=32,
    memory_gb=65,
    recompute=["vision_model"],
)
