# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V: GLM-4's decoder, its rotated pairs of neighbours with positions on three axes."""

from megatron.bridge.models.families import *


@register_bridge("Glm4vForConditionalGeneration", model_type="glm4v")
class GLM4VBridge(VisionBridge):
    texts = {"glm4v_text": "Glm4ForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    values = {"mrope_section": [8, 12, 12]}
