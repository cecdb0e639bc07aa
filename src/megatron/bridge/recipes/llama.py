# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Llama family."""

from megatron.bridge.recipes.builders import (
    dpo_recipe,
    finetune_recipe,
    grpo_recipe,
    low_precision_recipe,
    pretrain_recipe,
    qlora_recipe,
)
from megatron.bridge.recipes.options import (
    FP8,
    FP8_BLOCKWISE,
    LENGTH_1M,
    LENGTH_16K,
    LENGTH_64K,
    LENGTH_128K,
    MXFP8,
    NVFP4,
    LayoutOptions,
    PretrainOptions,
    layout,
)
from megatron.bridge.recipes.sizes import size_of

# Llama 2. Learning rates and batch size are from "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023).

LLAMA2_7B = "meta-llama/Llama-2-7b-hf"

llama2_7b_pretrain_config = pretrain_recipe(
    LLAMA2_7B,
    what="Llama 2 7B pretraining",
    gpus=8,
    memory_gb=71,
    seq_length=4096,
    global_batch_size=1024,
    lr=3e-4,
    min_lr=3e-5,
)
llama2_13b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-2-13b-hf",
    layout(tp=2),
    what="Llama 2 13B pretraining",
    gpus=16,
    memory_gb=65,
    seq_length=4096,
    global_batch_size=1024,
    lr=3e-4,
    min_lr=3e-5,
)
llama2_70b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-2-70b-hf",
    layout(tp=8, pp=2),
    what="Llama 2 70B pretraining",
    gpus=64,
    memory_gb=52,
    seq_length=4096,
    global_batch_size=1024,
    lr=1.5e-4,
    min_lr=1.5e-5,
)

llama2_7b_finetune_config = finetune_recipe(
    LLAMA2_7B, what="Llama 2 7B full fine-tuning", gpus=8, memory_gb=71
)
llama2_13b_finetune_config = finetune_recipe(
    "meta-llama/Llama-2-13b-hf",
    layout(tp=4),
    what="Llama 2 13B full fine-tuning",
    gpus=8,
    memory_gb=47,
)
llama2_70b_finetune_config = finetune_recipe(
    "meta-llama/Llama-2-70b-hf",
    layout(tp=8, pp=2),
    what="Llama 2 70B full fine-tuning",
    gpus=32,
    memory_gb=64,
)

# Llama 3, whose config Llama 3.1 to 3.3 share.
#
# Learning rates are from "The Llama 3 Herd of Models" (2024), table 3.

LLAMA3_8B = "meta-llama/Meta-Llama-3-8B"
LLAMA3_70B = "meta-llama/Meta-Llama-3-70B"
_PRETRAIN_8B: PretrainOptions = {"seq_length": 8192, "lr": 3e-4}
_PRETRAIN_70B: PretrainOptions = {"seq_length": 8192, "lr": 1.5e-4, "min_lr": 1.5e-6}

llama3_8b_pretrain_config = pretrain_recipe(
    LLAMA3_8B, _PRETRAIN_8B, layout(tp=2), what="Llama 3 8B pretraining", gpus=8, memory_gb=58
)
llama3_8b_16k_pretrain_config = pretrain_recipe(
    LLAMA3_8B,
    _PRETRAIN_8B,
    LENGTH_16K,
    layout(tp=2, cp=2),
    what="Llama 3 8B pretraining on 16k tokens",
    gpus=16,
    memory_gb=53,
)
llama3_8b_64k_pretrain_config = pretrain_recipe(
    LLAMA3_8B,
    _PRETRAIN_8B,
    LENGTH_64K,
    layout(tp=4, cp=2),
    what="Llama 3 8B pretraining on 64k tokens",
    gpus=32,
    memory_gb=62,
)
llama3_8b_128k_pretrain_config = pretrain_recipe(
    LLAMA3_8B,
    _PRETRAIN_8B,
    LENGTH_128K,
    layout(tp=4, cp=4),
    what="Llama 3 8B pretraining on 128k tokens",
    gpus=64,
    memory_gb=65,
)
llama3_70b_pretrain_config = pretrain_recipe(
    LLAMA3_70B,
    _PRETRAIN_70B,
    layout(tp=8, pp=2),
    what="Llama 3 70B pretraining",
    gpus=64,
    memory_gb=65,
)
llama3_70b_16k_pretrain_config = pretrain_recipe(
    LLAMA3_70B,
    _PRETRAIN_70B,
    LENGTH_16K,
    layout(tp=8, pp=2, cp=2),
    what="Llama 3 70B pretraining on 16k tokens",
    gpus=128,
    memory_gb=59,
)
llama3_70b_64k_pretrain_config = pretrain_recipe(
    LLAMA3_70B,
    _PRETRAIN_70B,
    LENGTH_64K,
    layout(tp=8, pp=2, cp=8),
    what="Llama 3 70B pretraining on 64k tokens",
    gpus=256,
    memory_gb=62,
)
llama3_70b_128k_pretrain_config = pretrain_recipe(
    LLAMA3_70B,
    _PRETRAIN_70B,
    LENGTH_128K,
    layout(tp=8, pp=2, cp=16),
    what="Llama 3 70B pretraining on 128k tokens",
    gpus=512,
    memory_gb=69,
)
llama3_8b_fp8_pretrain_config = pretrain_recipe(
    LLAMA3_8B,
    _PRETRAIN_8B,
    FP8,
    layout(tp=2),
    what="Llama 3 8B pretraining in FP8",
    gpus=8,
    memory_gb=65,
)
llama3_8b_fp8_blockwise_pretrain_config = pretrain_recipe(
    LLAMA3_8B,
    _PRETRAIN_8B,
    FP8_BLOCKWISE,
    layout(tp=2),
    what="Llama 3 8B pretraining in blockwise FP8",
    gpus=8,
    memory_gb=63,
)
llama3_8b_mxfp8_pretrain_config = pretrain_recipe(
    LLAMA3_8B,
    _PRETRAIN_8B,
    MXFP8,
    what="Llama 3 8B pretraining in MXFP8",
    gpus=8,
    gpu_kind="B200 180GB",
    memory_gb=113,
)
llama3_8b_nvfp4_pretrain_config = pretrain_recipe(
    LLAMA3_8B,
    _PRETRAIN_8B,
    NVFP4,
    what="Llama 3 8B pretraining in NVFP4",
    gpus=8,
    gpu_kind="B200 180GB",
    memory_gb=107,
)
llama3_8b_low_precision_pretrain_config = low_precision_recipe(
    LLAMA3_8B,
    _PRETRAIN_8B,
    FP8,
    layout(tp=2),
    what="Llama 3 8B pretraining in a low precision",
    gpus=8,
    memory_gb=65,
)
llama3_70b_fp8_pretrain_config = pretrain_recipe(
    LLAMA3_70B,
    _PRETRAIN_70B,
    FP8,
    layout(tp=8, pp=4, vp=5),
    what="Llama 3 70B pretraining in FP8",
    gpus=64,
    memory_gb=60,
)
llama3_70b_fp8_blockwise_pretrain_config = pretrain_recipe(
    LLAMA3_70B,
    _PRETRAIN_70B,
    FP8_BLOCKWISE,
    layout(tp=8, pp=4, vp=5),
    what="Llama 3 70B pretraining in blockwise FP8",
    gpus=64,
    memory_gb=56,
)
llama3_70b_mxfp8_pretrain_config = pretrain_recipe(
    LLAMA3_70B,
    _PRETRAIN_70B,
    MXFP8,
    layout(tp=4, pp=2),
    what="Llama 3 70B pretraining in MXFP8",
    gpus=64,
    gpu_kind="B200 180GB",
    memory_gb=125,
)
llama3_70b_nvfp4_pretrain_config = pretrain_recipe(
    LLAMA3_70B,
    _PRETRAIN_70B,
    NVFP4,
    layout(tp=4, pp=2),
    what="Llama 3 70B pretraining in NVFP4",
    gpus=64,
    gpu_kind="B200 180GB",
    memory_gb=118,
)

llama3_8b_finetune_config = finetune_recipe(
    LLAMA3_8B, layout(tp=2), what="Llama 3 8B full fine-tuning", gpus=8, memory_gb=48
)
llama3_8b_qlora_config = qlora_recipe(LLAMA3_8B, what="Llama 3 8B QLoRA", memory_gb=29)
llama3_70b_finetune_config = finetune_recipe(
    LLAMA3_70B, layout(tp=8, pp=2), what="Llama 3 70B full fine-tuning", gpus=32, memory_gb=66
)

# Llama 3.1: Llama 3 with 128k positions, and 405B.
#
# Learning rates are from "The Llama 3 Herd of Models" (2024), table 3. The 126 layers of 405B do not divide evenly
# into stages; with the embedding and the loss they count as 128.

LLAMA31_70B = "meta-llama/Llama-3.1-70B"
LLAMA31_405B = "meta-llama/Llama-3.1-405B"
_PRETRAIN_405B: PretrainOptions = {
    "seq_length": 8192,
    "lr": 8e-5,
    "min_lr": 8e-7,
    "embedding_and_loss_are_layers": True,
}

llama31_8b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.1-8B",
    layout(tp=2),
    what="Llama 3.1 8B pretraining",
    gpus=8,
    memory_gb=58,
    seq_length=8192,
    lr=3e-4,
)
llama31_70b_pretrain_config = pretrain_recipe(
    LLAMA31_70B,
    _PRETRAIN_70B,
    layout(tp=8, pp=2),
    what="Llama 3.1 70B pretraining",
    gpus=64,
    memory_gb=65,
)
llama31_405b_pretrain_config = pretrain_recipe(
    LLAMA31_405B,
    _PRETRAIN_405B,
    layout(tp=8, pp=8, vp=4, cp=4),
    what="Llama 3.1 405B pretraining",
    gpus=1024,
    memory_gb=67,
)
llama31_8b_128k_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.1-8B",
    LENGTH_128K,
    layout(tp=4, cp=4),
    what="Llama 3.1 8B pretraining on 128k tokens",
    gpus=64,
    memory_gb=65,
    lr=3e-4,
)
llama31_70b_128k_pretrain_config = pretrain_recipe(
    LLAMA31_70B,
    _PRETRAIN_70B,
    LENGTH_128K,
    layout(tp=8, pp=2, cp=16),
    what="Llama 3.1 70B pretraining on 128k tokens",
    gpus=512,
    memory_gb=69,
)
llama31_405b_128k_pretrain_config = pretrain_recipe(
    LLAMA31_405B,
    _PRETRAIN_405B,
    LENGTH_128K,
    layout(tp=8, pp=8, vp=4, cp=4),
    what="Llama 3.1 405B pretraining on 128k tokens",
    gpus=1024,
    memory_gb=67,
    recompute="full",
)

# Positions of 1M tokens as in "From 128K to 4M: Efficient Training of Ultra-Long Context Large Language Models" (2025,
# UltraLong): YaRN with alpha 1, beta 4 and the scale 128 of the original 8,192 positions, and about a billion tokens
# in steps of 8M. The learning rate is a tenth of that of pretraining, because the run goes on from trained weights.
# Keys go around a ring: without Transformer Engine they would be gathered, which takes 50 GB more.
LLAMA31_8B_1M = size_of(
    "meta-llama/Llama-3.1-8B",
    training={"cp_comm_type": "p2p"},
    max_position_embeddings=1048576,
    rope_parameters={
        "rope_type": "yarn",
        "factor": 128.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
)
llama31_8b_1m_pretrain_config = pretrain_recipe(
    LLAMA31_8B_1M,
    LENGTH_1M,
    layout(tp=8, cp=16),
    what="Llama 3.1 8B pretraining on 1M tokens",
    gpus=256,
    memory_gb=51,
    lr=3e-5,
    min_lr=3e-6,
    train_iters=150,
    eval_interval=50,
    save_interval=50,
)
llama31_405b_fp8_pretrain_config = pretrain_recipe(
    LLAMA31_405B,
    _PRETRAIN_405B,
    FP8,
    layout(tp=8, pp=16, vp=4, cp=4),
    what="Llama 3.1 405B pretraining in FP8",
    gpus=1024,
    memory_gb=55,
)
llama31_405b_mxfp8_pretrain_config = pretrain_recipe(
    LLAMA31_405B,
    _PRETRAIN_405B,
    MXFP8,
    layout(tp=8, pp=8, vp=8),
    what="Llama 3.1 405B pretraining in MXFP8",
    gpus=512,
    gpu_kind="B200 180GB",
    memory_gb=129,
)
llama31_405b_nvfp4_pretrain_config = pretrain_recipe(
    LLAMA31_405B,
    _PRETRAIN_405B,
    NVFP4,
    layout(tp=8, pp=8, vp=8),
    what="Llama 3.1 405B pretraining in NVFP4",
    gpus=512,
    gpu_kind="B200 180GB",
    memory_gb=125,
)

llama31_8b_finetune_config = finetune_recipe(
    "meta-llama/Llama-3.1-8B",
    layout(tp=2),
    what="Llama 3.1 8B full fine-tuning",
    gpus=8,
    memory_gb=48,
)
llama31_70b_finetune_config = finetune_recipe(
    LLAMA31_70B, layout(tp=8, pp=2), what="Llama 3.1 70B full fine-tuning", gpus=32, memory_gb=66
)
llama31_405b_finetune_config = finetune_recipe(
    LLAMA31_405B,
    layout(tp=8, pp=16, vp=4, cp=2),
    what="Llama 3.1 405B full fine-tuning",
    gpus=256,
    memory_gb=62,
    embedding_and_loss_are_layers=True,
)

# Llama 3.2 and Llama 3.3, a further-trained 3.1 70B. The learning rates of Llama 3.2 are our own.

llama32_1b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.2-1B",
    what="Llama 3.2 1B pretraining",
    gpus=8,
    memory_gb=25,
    seq_length=8192,
    lr=5e-4,
    min_lr=5e-6,
)
llama32_3b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.2-3B",
    what="Llama 3.2 3B pretraining",
    gpus=8,
    memory_gb=51,
    seq_length=8192,
    lr=3e-4,
)
llama33_70b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.3-70B-Instruct",
    layout(tp=8, pp=2),
    what="Llama 3.3 70B pretraining",
    gpus=64,
    memory_gb=65,
    seq_length=8192,
    lr=1.5e-4,
    min_lr=1.5e-6,
)

llama32_1b_finetune_config = finetune_recipe(
    "meta-llama/Llama-3.2-1B", what="Llama 3.2 1B full fine-tuning", gpus=1, memory_gb=30, lr=1e-5
)
llama32_1b_dpo_config = dpo_recipe(
    "meta-llama/Llama-3.2-1B", what="Llama 3.2 1B DPO", gpus=1, memory_gb=36, lr=1e-6
)
llama32_1b_grpo_config = grpo_recipe(
    "meta-llama/Llama-3.2-1B", what="Llama 3.2 1B GRPO", gpus=1, memory_gb=26
)
llama32_3b_finetune_config = finetune_recipe(
    "meta-llama/Llama-3.2-3B", what="Llama 3.2 3B full fine-tuning", gpus=8, memory_gb=38, lr=1e-5
)
llama33_70b_finetune_config = finetune_recipe(
    "meta-llama/Llama-3.3-70B-Instruct",
    layout(tp=8, pp=2),
    what="Llama 3.3 70B full fine-tuning",
    gpus=32,
    memory_gb=66,
)

# The text model of Llama 4. Learning rates are our own.

LLAMA4_SCOUT_109B = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
_LAYOUT: LayoutOptions = layout(tp=2, pp=4, ep=8, etp=1)

llama4_scout_109b_pretrain_config = pretrain_recipe(
    LLAMA4_SCOUT_109B,
    _LAYOUT,
    what="Llama 4 Scout 109B-A17B (text) pretraining",
    gpus=64,
    memory_gb=68,
    seq_length=4096,
    lr=2e-4,
)
llama4_scout_109b_finetune_config = finetune_recipe(
    LLAMA4_SCOUT_109B,
    _LAYOUT,
    what="Llama 4 Scout 109B-A17B (text) full fine-tuning",
    gpus=64,
    memory_gb=68,
)
