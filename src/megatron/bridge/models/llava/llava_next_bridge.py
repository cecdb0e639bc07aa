# SPDX-License-Identifier: Apache-2.0
"""Llava-NeXT (1.6): large images as several tiles and a small copy of the whole."""

from megatron.bridge.models.conversion.model_bridge import register_bridge
from megatron.bridge.models.llava.llava_bridge import LlavaBridge


@register_bridge("LlavaNextForConditionalGeneration", model_type="llava_next")
class LlavaNextBridge(LlavaBridge):
    tower = (*LlavaBridge.tower, "image_newline")
