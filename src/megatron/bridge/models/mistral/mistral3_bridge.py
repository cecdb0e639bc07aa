# SPDX-License-Identifier: Apache-2.0
"""Mistral Small 3.1 and 3.2, Ministral 3: Pixtral's tower in front of Mistral's decoder."""

from megatron.bridge.models.families import *


@register_bridge("Mistral3ForConditionalGeneration", model_type="mistral3")
class Mistral3Bridge(VisionBridge):
    texts = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES
