# SPDX-License-Identifier: Apache-2.0
"""Llava 1.5: a tower of CLIP or SigLIP in front of Llama, Mistral or Qwen2."""

from megatron.bridge.models.families import (
    LLAVA_NAMES,
    LLAVA_OTHER_NAMES,
    VisionBridge,
    register_bridge,
)


@register_bridge("LlavaForConditionalGeneration", model_type="llava")
class LlavaBridge(VisionBridge):
    texts = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    }
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES


@register_bridge("LlavaNextForConditionalGeneration", model_type="llava_next")
class LlavaNextBridge(LlavaBridge):
    """Llava-NeXT (1.6): large images as several tiles and a small copy of the whole."""

    tower = (*LlavaBridge.tower, "image_newline")


@register_bridge("LlavaOnevisionForConditionalGeneration", model_type="llava_onevision")
class LlavaOnevisionBridge(LlavaNextBridge):
    """Llava-OneVision: tiles as in Llava-NeXT, several images, and videos."""
