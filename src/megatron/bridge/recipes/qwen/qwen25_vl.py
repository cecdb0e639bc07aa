# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL and Qwen2.5-VL. Learning rates are our own.

The memory is that of samples that consist of images, which are shared out evenly over tensor-parallel ranks.
"""

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.options import layout

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
