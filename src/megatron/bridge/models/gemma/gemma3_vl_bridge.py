# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with images, 4B to 27B: the tokens of an image attend to each other both ways."""

from megatron.bridge.models.families import *


@register_bridge("Gemma3ForConditionalGeneration", model_type="gemma3")
class Gemma3VLBridge(VisionBridge):
    texts = {"gemma3_text": "Gemma3ForCausalLM"}
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES
    values = {"bidirectional_images": True}
    tied_unless_said = True
