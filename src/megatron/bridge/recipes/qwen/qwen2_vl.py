# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL. The learning rate is our own.

The layout leaves room for activations of the tower, which depend on the images and are not in the memory named here.
"""

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.sizes import size_of

QWEN2_VL_2B = size_of("Qwen/Qwen2-VL-2B-Instruct")

qwen2_vl_2b_finetune_config = finetune_recipe(QWEN2_VL_2B, lr=1e-5)
"""Qwen2-VL 2B full fine-tuning, 8 x H100 80GB: 28 GB each, no model parallelism."""
