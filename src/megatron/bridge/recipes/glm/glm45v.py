# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5V: GLM-4.5 Air with a vision tower. The learning rate is our own.

The memory is that of samples that consist of images, which are shared out evenly over tensor-parallel ranks.
"""

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.options import LayoutOptions, layout

_STAGES: LayoutOptions = {"pipeline_layout": "Et*3|(t*4|)*10t*3L"}

glm_45v_finetune_config = finetune_recipe(
    "zai-org/GLM-4.5V", _STAGES, layout(tp=4, pp=4, vp=3, ep=8, etp=1), recompute=["vision_model"]
)
"""GLM-4.5V 106B-A12B full fine-tuning, 64 x H100 80GB: 64 GB each, TP4 PP4 EP8."""
