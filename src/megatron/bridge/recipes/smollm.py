# SPDX-License-Identifier: Apache-2.0
"""Recipes of the SmolLM family."""

from megatron.bridge.recipes.builders import distill_recipe, finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.sizes import size_of

# SmolLM2: small enough for one GPU or a laptop.
#
# The learning rates for pretraining 360M and 1.7B are from "SmolLM2: When Smol Goes Big" (2025); the others are our
# own.

SMOLLM2_135M = "HuggingFaceTB/SmolLM2-135M"
SMOLLM2_1P7B = "HuggingFaceTB/SmolLM2-1.7B"

# Our own size: a fifth of the layers, for a student with the width of its teacher.
SMOLLM2_50M = size_of("HuggingFaceTB/SmolLM2-135M", num_hidden_layers=6)

smollm2_135m_pretrain_config = pretrain_recipe(
    SMOLLM2_135M,
    what="SmolLM2 135M pretraining",
    gpus=1,
    memory_gb=28,
    seq_length=2048,
    micro_batch_size=16,
    lr=1e-3,
    min_lr=1e-4,
)
smollm2_360m_pretrain_config = pretrain_recipe(
    "HuggingFaceTB/SmolLM2-360M",
    what="SmolLM2 360M pretraining",
    gpus=8,
    memory_gb=23,
    seq_length=2048,
    global_batch_size=1024,
    micro_batch_size=8,
    lr=3e-3,
    min_lr=3e-5,
)
smollm2_1p7b_pretrain_config = pretrain_recipe(
    SMOLLM2_1P7B,
    what="SmolLM2 1.7B pretraining",
    gpus=8,
    memory_gb=33,
    seq_length=2048,
    global_batch_size=1024,
    micro_batch_size=4,
    lr=5e-4,
    min_lr=5e-6,
)
smollm2_50m_distill_config = distill_recipe(
    SMOLLM2_50M,
    SMOLLM2_135M,
    what="SmolLM2 50M distilled from SmolLM2 135M",
    gpus=1,
    memory_gb=22,
    seq_length=2048,
    micro_batch_size=16,
    lr=1e-3,
    min_lr=1e-4,
)

smollm2_135m_finetune_config = finetune_recipe(
    SMOLLM2_135M,
    what="SmolLM2 135M full fine-tuning",
    gpus=1,
    memory_gb=28,
    seq_length=2048,
    micro_batch_size=16,
    lr=1e-4,
)
smollm2_360m_finetune_config = finetune_recipe(
    "HuggingFaceTB/SmolLM2-360M",
    what="SmolLM2 360M full fine-tuning",
    gpus=1,
    memory_gb=26,
    seq_length=2048,
    micro_batch_size=8,
    lr=3e-5,
)
smollm2_1p7b_finetune_config = finetune_recipe(
    SMOLLM2_1P7B,
    what="SmolLM2 1.7B full fine-tuning",
    gpus=8,
    memory_gb=33,
    seq_length=2048,
    micro_batch_size=4,
    lr=1e-5,
)

# SmolLM3. Learning rate and batch size are from its announcement (2025).

SMOLLM3_3B = "HuggingFaceTB/SmolLM3-3B"

smollm3_3b_pretrain_config = pretrain_recipe(
    SMOLLM3_3B,
    what="SmolLM3 3B pretraining",
    gpus=8,
    memory_gb=40,
    seq_length=4096,
    global_batch_size=576,
    lr=2e-4,
    min_lr=2e-6,
)

smollm3_3b_finetune_config = finetune_recipe(
    SMOLLM3_3B, what="SmolLM3 3B full fine-tuning", gpus=8, memory_gb=40, lr=1e-5
)

# SmolVLM2, small enough for a laptop. The learning rate is our own.
#
# The memory is for samples that consist of images.

smolvlm2_256m_finetune_config = finetune_recipe(
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct",
    what="SmolVLM2 256M full fine-tuning",
    gpus=1,
    memory_gb=28,
    lr=1e-4,
)
