# SPDX-License-Identifier: Apache-2.0
"""Llava 1.5: a tower of CLIP or SigLIP in front of Llama, Mistral or Qwen2."""

from megatron.bridge.models.families import *


@register_bridge("LlavaForConditionalGeneration", model_type="llava")
class LlavaBridge(VisionBridge):
    texts = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES
