# SPDX-License-Identifier: Apache-2.0
"""PaliGemma and PaliGemma 2: SigLIP in front of Gemma or Gemma 2, whose prompt attends to itself both ways."""

from megatron.bridge.models.families import *


@register_bridge("PaliGemmaForConditionalGeneration", model_type="paligemma")
class PaliGemmaBridge(VisionBridge):
    texts = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM"}
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES
    text_ignored = ("num_image_tokens", "use_bidirectional_attention")  # the mask is given with each sample
    values = {"bidirectional_prompt": True}
    tied_unless_said = True
