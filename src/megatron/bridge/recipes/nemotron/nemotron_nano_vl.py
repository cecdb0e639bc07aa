# SPDX-License-Identifier: Apache-2.0
"""Nemotron Nano VL v2. Learning rates and the batch size of pretraining are Megatron Bridge's.

The published config could not be read (docs/vision.md says which of its numbers are not known): pass the model as
``hf_model`` to train what the hub has. The memory is that of samples that consist of images, which are shared out
evenly over tensor-parallel ranks.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

NEMOTRON_NANO_VL = "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16"

nemotron_nano_v2_vl_12b_pretrain_config = pretrain_recipe(
    NEMOTRON_NANO_VL, layout(tp=4), seq_length=4096, global_batch_size=32, lr=3e-4, min_lr=3e-5
)
"""Nemotron Nano v2 VL 12B pretraining, 8 x H100 80GB: 61 GB each, TP4."""
nemotron_nano_v2_vl_12b_finetune_config = finetune_recipe(NEMOTRON_NANO_VL, layout(tp=4), lr=1e-5, min_lr=1e-6)
"""Nemotron Nano v2 VL 12B full fine-tuning, 8 x H100 80GB: 61 GB each, TP4."""
