# SPDX-License-Identifier: Apache-2.0
"""Recipes of models that hear."""

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.options import layout

# Learning rates are our own. The memory is for samples that consist of audio, which is distributed evenly over
# tensor-parallel ranks.

qwen2_audio_7b_finetune_config = finetune_recipe(
    "Qwen/Qwen2-Audio-7B-Instruct",
    layout(tp=2),
    what="Qwen2-Audio 7B full fine-tuning",
    gpus=8,
    memory_gb=58,
)
voxtral_mini_3b_finetune_config = finetune_recipe(
    "mistralai/Voxtral-Mini-3B-2507",
    what="Voxtral Mini 3B full fine-tuning",
    gpus=8,
    memory_gb=52,
    recompute=["vision_model"],
)
