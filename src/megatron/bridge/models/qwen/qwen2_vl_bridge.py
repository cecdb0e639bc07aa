# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL and Qwen2.5-VL: Qwen2's decoder, positions on three axes."""

from megatron.bridge.models.families import *


@register_bridge("Qwen2VLForConditionalGeneration", model_type="qwen2_vl")
class Qwen2VLBridge(VisionBridge):
    texts = {"qwen2_vl_text": "Qwen2ForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.", "visual.": "visual."}
    other_names = {"model.visual.": {"model.": "model.language_model.", "visual.": "model.visual."}}


@register_bridge("Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl")
class Qwen25VLBridge(Qwen2VLBridge):
    texts = {"qwen2_5_vl_text": "Qwen2ForCausalLM"}
