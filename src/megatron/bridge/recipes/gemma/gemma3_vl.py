# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with its vision tower. Learning rates are our own.

The memory is that of samples that consist of images, which are shared out evenly over tensor-parallel ranks.
"""

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.options import layout

gemma3_vl_4b_finetune_config = finetune_recipe("google/gemma-3-4b-it", layout(tp=4), lr=1e-5)
"""Gemma 3 VL 4B full fine-tuning, 8 x H100 80GB: 40 GB each, TP4."""
gemma3_vl_12b_finetune_config = finetune_recipe("google/gemma-3-12b-it", layout(tp=8))
"""Gemma 3 VL 12B full fine-tuning, 16 x H100 80GB: 38 GB each, TP8."""
gemma3_vl_27b_finetune_config = finetune_recipe("google/gemma-3-27b-it", layout(tp=8))
"""Gemma 3 VL 27B full fine-tuning, 16 x H100 80GB: 66 GB each, TP8."""
