# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL, dense and mixture of experts. Learning rates are our own.

The memory is that of samples that consist of images, which are shared out evenly over tensor-parallel ranks.
"""

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.options import layout

qwen3_vl_8b_finetune_config = finetune_recipe("Qwen/Qwen3-VL-8B-Instruct", layout(tp=2))
"""Qwen3-VL 8B full fine-tuning, 8 x H100 80GB: 64 GB each, TP2."""
qwen3_vl_30b_a3b_finetune_config = finetune_recipe("Qwen/Qwen3-VL-30B-A3B-Instruct", layout(tp=4, ep=8, etp=1))
"""Qwen3-VL 30B-A3B full fine-tuning, 16 x H100 80GB: 64 GB each, TP4 EP8."""
# two virtual stages, because the first chunk must hold the three layers that features of images are added behind
qwen3_vl_235b_a22b_finetune_config = finetune_recipe(
    "Qwen/Qwen3-VL-235B-A22B-Instruct",
    layout(tp=8, pp=8, vp=2, ep=8, etp=1),
    embedding_and_loss_are_layers=True,
    recompute=["vision_model"],
)
"""Qwen3-VL 235B-A22B full fine-tuning, 128 x H100 80GB: 71 GB each, TP8 PP8 EP8."""
