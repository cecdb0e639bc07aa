# SPDX-License-Identifier: Apache-2.0
"""Llama 4 as it is published, Scout and Maverick: the decoder behind a tower whose images are tiles."""

from megatron.bridge.models.families import *


@register_bridge("Llama4ForConditionalGeneration", model_type="llama4")
class Llama4VLBridge(VisionBridge):
    texts = {"llama4_text": "Llama4ForCausalLM"}
    tower = ("vision_model", "multi_modal_projector")
    names = LLAVA_NAMES

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        """Transformers' modules have the names of the checkpoint."""
        return registry
