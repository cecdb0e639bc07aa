# SPDX-License-Identifier: Apache-2.0
"""Llava-OneVision: tiles as in Llava-NeXT, several images, and videos."""

from megatron.bridge.models.conversion.model_bridge import register_bridge
from megatron.bridge.models.llava.llava_next_bridge import LlavaNextBridge


@register_bridge("LlavaOnevisionForConditionalGeneration", model_type="llava_onevision")
class LlavaOnevisionBridge(LlavaNextBridge):
    """Hugging Face's ``LlavaOnevisionForConditionalGeneration`` and Megatron's ``GPTModel`` behind its tower."""
