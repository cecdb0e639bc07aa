# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 as it is published, 0.8B to 27B and with experts: the text model behind Qwen3-VL's tower."""

from megatron.bridge.models.families import *
from megatron.bridge.models.qwen.qwen3_vl_moe_bridge import Qwen3VLMoEBridge


@register_bridge("Qwen3_5ForConditionalGeneration", model_type="qwen3_5")
class Qwen35VLBridge(VisionBridge):
    texts = {"qwen3_5_text": "Qwen3_5ForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    values = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}


@register_bridge("Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe")
class Qwen35VLMoeBridge(Qwen35VLBridge):
    texts = {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
    spelled_as = Qwen3VLMoEBridge.spelled_as
