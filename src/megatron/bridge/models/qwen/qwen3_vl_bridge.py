# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL: Qwen3's decoder, positions on three axes that take turns, features behind its first layers too."""

from megatron.bridge.models.families import *


@register_bridge("Qwen3VLForConditionalGeneration", model_type="qwen3_vl")
class Qwen3VLBridge(VisionBridge):
    texts = {"qwen3_vl_text": "Qwen3ForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    text_values = {"layer_types": lambda text: ["full_attention"] * text["num_hidden_layers"]}
    values = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
