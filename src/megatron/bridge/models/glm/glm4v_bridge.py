# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V: GLM-4's decoder, its rotated pairs of neighbours with positions on three axes."""

from megatron.bridge.models.families import *


@register_bridge("Glm4vForConditionalGeneration", model_type="glm4v")
class GLM4VBridge(VisionBridge):
    texts = {"glm4v_text": "Glm4ForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    values = {"mrope_section": [8, 12, 12]}


@register_bridge("Glm4vMoeForConditionalGeneration", model_type="glm4v_moe")
class GLM45VBridge(VisionBridge):
    """GLM-4.5V: GLM-4.5's decoder without multi-token prediction, positions on three axes."""

    texts = {"glm4v_moe_text": "Glm4MoeForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    values = {"mrope_section": [8, 12, 12]}
    text_ignored = ("router_aux_loss_coef", "image_token_id", "image_start_token_id", "image_end_token_id")
    text_values = {"num_nextn_predict_layers": 0}
