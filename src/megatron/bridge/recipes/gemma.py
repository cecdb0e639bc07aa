# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Gemma family."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.options import layout

# Gemma. Learning rates are our own: none are published.

gemma_2b_pretrain_config = pretrain_recipe("google/gemma-2b", seq_length=8192, lr=3e-4)
gemma_7b_pretrain_config = pretrain_recipe(
    "google/gemma-7b", layout(tp=4), seq_length=8192, lr=3e-4
)

gemma_2b_finetune_config = finetune_recipe("google/gemma-2b", lr=1e-5)
gemma_7b_finetune_config = finetune_recipe("google/gemma-7b", layout(tp=2))

# Gemma 2. Learning rates are our own: none are published.

gemma2_2b_pretrain_config = pretrain_recipe("google/gemma-2-2b", seq_length=8192, lr=3e-4)
gemma2_9b_pretrain_config = pretrain_recipe(
    "google/gemma-2-9b", layout(tp=4), seq_length=8192, lr=3e-4
)
gemma2_27b_pretrain_config = pretrain_recipe(
    "google/gemma-2-27b", layout(tp=8), seq_length=8192, lr=2e-4
)
vaultgemma_1b_pretrain_config = pretrain_recipe(
    "google/vaultgemma-1b", seq_length=1024, micro_batch_size=4, lr=5e-4
)

gemma2_2b_finetune_config = finetune_recipe("google/gemma-2-2b", lr=1e-5)
gemma2_9b_finetune_config = finetune_recipe("google/gemma-2-9b", layout(tp=2))
gemma2_27b_finetune_config = finetune_recipe("google/gemma-2-27b", layout(tp=8))
vaultgemma_1b_finetune_config = finetune_recipe(
    "google/vaultgemma-1b", seq_length=1024, micro_batch_size=4, lr=1e-5
)

# Gemma 3 and 4; for vision-language models (4B and larger), only the text model. Learning rates are our own.
#
# The config of these text models is ``text_config`` of the published config.

GEMMA4_26B_A4B = "google/gemma-4-26B-A4B-it"

gemma3_1b_pretrain_config = pretrain_recipe("google/gemma-3-1b-pt", seq_length=8192, lr=5e-4)
gemma3_4b_pretrain_config = pretrain_recipe(
    "google/gemma-3-4b-pt", layout(tp=2), seq_length=8192, lr=3e-4
)
gemma3_12b_pretrain_config = pretrain_recipe(
    "google/gemma-3-12b-pt", layout(tp=4), seq_length=8192, lr=3e-4
)
gemma3_27b_pretrain_config = pretrain_recipe(
    "google/gemma-3-27b-pt", layout(tp=8), seq_length=8192, lr=2e-4
)
gemma4_26b_a4b_pretrain_config = pretrain_recipe(
    GEMMA4_26B_A4B, layout(tp=2, ep=8, etp=1), seq_length=8192, lr=3e-4
)

gemma3_1b_finetune_config = finetune_recipe("google/gemma-3-1b-pt", lr=1e-5)
gemma3_4b_finetune_config = finetune_recipe("google/gemma-3-4b-pt", lr=1e-5)
gemma3_12b_finetune_config = finetune_recipe("google/gemma-3-12b-pt", layout(tp=4))
gemma3_27b_finetune_config = finetune_recipe("google/gemma-3-27b-pt", layout(tp=8))
gemma4_26b_a4b_finetune_config = finetune_recipe(GEMMA4_26B_A4B, layout(tp=2, ep=8, etp=1))

# Gemma 3 with its vision tower. Learning rates are our own.
#
# The memory is for samples that consist of images, which are distributed evenly over tensor-parallel ranks.

gemma3_vl_4b_finetune_config = finetune_recipe("google/gemma-3-4b-it", layout(tp=4), lr=1e-5)
gemma3_vl_12b_finetune_config = finetune_recipe("google/gemma-3-12b-it", layout(tp=8))
gemma3_vl_27b_finetune_config = finetune_recipe("google/gemma-3-27b-it", layout(tp=8))

name_functions(__name__)
