# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Gemma family."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import TEXT_MODEL

# Gemma. Learning rates are our own: none are published.

gemma_2b_pretrain_config = pretrain_recipe(
    "google/gemma-2b", what="Gemma 2B pretraining", gpus=8, memory_gb=58, seq_length=8192, lr=3e-4
)
gemma_7b_pretrain_config = pretrain_recipe(
    "google/gemma-7b",
    layout(tp=4),
    what="Gemma 7B pretraining",
    gpus=16,
    memory_gb=41,
    seq_length=8192,
    lr=3e-4,
)

gemma_2b_finetune_config = finetune_recipe(
    "google/gemma-2b", what="Gemma 2B full fine-tuning", gpus=8, memory_gb=38, lr=1e-5
)
gemma_7b_finetune_config = finetune_recipe(
    "google/gemma-7b", layout(tp=2), what="Gemma 7B full fine-tuning", gpus=8, memory_gb=60
)

# Gemma 2. Learning rates are our own: none are published.

gemma2_2b_pretrain_config = pretrain_recipe(
    "google/gemma-2-2b",
    what="Gemma 2 2B pretraining",
    gpus=8,
    memory_gb=62,
    seq_length=8192,
    lr=3e-4,
)
gemma2_9b_pretrain_config = pretrain_recipe(
    "google/gemma-2-9b",
    layout(tp=4),
    what="Gemma 2 9B pretraining",
    gpus=16,
    memory_gb=46,
    seq_length=8192,
    lr=3e-4,
)
gemma2_27b_pretrain_config = pretrain_recipe(
    "google/gemma-2-27b",
    layout(tp=8),
    what="Gemma 2 27B pretraining",
    gpus=32,
    memory_gb=56,
    seq_length=8192,
    lr=2e-4,
)
vaultgemma_1b_pretrain_config = pretrain_recipe(
    "google/vaultgemma-1b",
    what="VaultGemma 1B pretraining",
    gpus=8,
    memory_gb=23,
    seq_length=1024,
    micro_batch_size=4,
    lr=5e-4,
)

gemma2_2b_finetune_config = finetune_recipe(
    "google/gemma-2-2b", what="Gemma 2 2B full fine-tuning", gpus=8, memory_gb=41, lr=1e-5
)
gemma2_9b_finetune_config = finetune_recipe(
    "google/gemma-2-9b", layout(tp=2), what="Gemma 2 9B full fine-tuning", gpus=8, memory_gb=66
)
gemma2_27b_finetune_config = finetune_recipe(
    "google/gemma-2-27b", layout(tp=8), what="Gemma 2 27B full fine-tuning", gpus=16, memory_gb=54
)
vaultgemma_1b_finetune_config = finetune_recipe(
    "google/vaultgemma-1b",
    what="VaultGemma 1B full fine-tuning",
    gpus=8,
    memory_gb=23,
    seq_length=1024,
    micro_batch_size=4,
    lr=1e-5,
)

# Gemma 3 and 4; for vision-language models (4B and larger), only the text model. Learning rates are our own.
#
# The config of these text models is ``text_config`` of the published config.

GEMMA4_26B_A4B = "google/gemma-4-26B-A4B-it"

gemma3_1b_pretrain_config = pretrain_recipe(
    "google/gemma-3-1b-pt",
    what="Gemma 3 1B pretraining",
    gpus=8,
    memory_gb=40,
    seq_length=8192,
    lr=5e-4,
)
gemma3_4b_pretrain_config = pretrain_recipe(
    "google/gemma-3-4b-pt",
    layout(tp=2),
    what="Gemma 3 4B (text) pretraining",
    gpus=8,
    memory_gb=49,
    seq_length=8192,
    lr=3e-4,
)
gemma3_12b_pretrain_config = pretrain_recipe(
    "google/gemma-3-12b-pt",
    layout(tp=4),
    what="Gemma 3 12B (text) pretraining",
    gpus=16,
    memory_gb=59,
    seq_length=8192,
    lr=3e-4,
)
gemma3_27b_pretrain_config = pretrain_recipe(
    "google/gemma-3-27b-pt",
    layout(tp=8),
    what="Gemma 3 27B (text) pretraining",
    gpus=32,
    memory_gb=58,
    seq_length=8192,
    lr=2e-4,
)
gemma4_26b_a4b_pretrain_config = pretrain_recipe(
    GEMMA4_26B_A4B + TEXT_MODEL,
    layout(tp=2, ep=8, etp=1),
    what="Gemma 4 26B-A4B (text) pretraining",
    gpus=32,
    memory_gb=69,
    seq_length=8192,
    lr=3e-4,
)

gemma3_1b_finetune_config = finetune_recipe(
    "google/gemma-3-1b-pt", what="Gemma 3 1B full fine-tuning", gpus=1, memory_gb=34, lr=1e-5
)
gemma3_4b_finetune_config = finetune_recipe(
    "google/gemma-3-4b-pt", what="Gemma 3 4B (text) full fine-tuning", gpus=8, memory_gb=61, lr=1e-5
)
gemma3_12b_finetune_config = finetune_recipe(
    "google/gemma-3-12b-pt",
    layout(tp=4),
    what="Gemma 3 12B (text) full fine-tuning",
    gpus=8,
    memory_gb=52,
)
gemma3_27b_finetune_config = finetune_recipe(
    "google/gemma-3-27b-pt",
    layout(tp=8),
    what="Gemma 3 27B (text) full fine-tuning",
    gpus=16,
    memory_gb=54,
)
gemma4_26b_a4b_finetune_config = finetune_recipe(
    GEMMA4_26B_A4B + TEXT_MODEL,
    layout(tp=2, ep=8, etp=1),
    what="Gemma 4 26B-A4B (text) full fine-tuning",
    gpus=16,
    memory_gb=61,
)

# Gemma 3 with its vision tower. Learning rates are our own.
#
# The memory is for samples that consist of images, which are distributed evenly over tensor-parallel ranks.

gemma3_vl_4b_finetune_config = finetune_recipe(
    "google/gemma-3-4b-it",
    layout(tp=4),
    what="Gemma 3 VL 4B full fine-tuning",
    gpus=8,
    memory_gb=41,
    lr=1e-5,
)
gemma3_vl_12b_finetune_config = finetune_recipe(
    "google/gemma-3-12b-it",
    layout(tp=8),
    what="Gemma 3 VL 12B full fine-tuning",
    gpus=16,
    memory_gb=39,
)
gemma3_vl_27b_finetune_config = finetune_recipe(
    "google/gemma-3-27b-it",
    layout(tp=8),
    what="Gemma 3 VL 27B full fine-tuning",
    gpus=16,
    memory_gb=67,
)

# Gemma 4 with images. Learning rates are our own.
#
# The memory is for samples that consist of images, which are distributed evenly over tensor-parallel ranks.

gemma4_vl_e4b_finetune_config = finetune_recipe(
    "google/gemma-4-E4B-it",
    layout(tp=2),
    what="Gemma 4 VL E4B full fine-tuning",
    gpus=8,
    memory_gb=54,
    lr=1e-5,
    recompute=["vision_model"],
)
gemma4_vl_12b_finetune_config = finetune_recipe(
    "google/gemma-4-12B-it",
    layout(tp=4),
    what="Gemma 4 VL 12B full fine-tuning",
    gpus=8,
    memory_gb=51,
)
gemma4_vl_26b_a4b_finetune_config = finetune_recipe(
    GEMMA4_26B_A4B,
    layout(tp=2, ep=8, etp=1),
    what="Gemma 4 VL 26B-A4B full fine-tuning",
    gpus=16,
    memory_gb=66,
    recompute=["vision_model"],
)
gemma4_vl_31b_finetune_config = finetune_recipe(
    "google/gemma-4-31B-it",
    layout(tp=8),
    what="Gemma 4 VL 31B full fine-tuning",
    gpus=32,
    memory_gb=67,
)
