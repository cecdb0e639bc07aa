# SPDX-License-Identifier: Apache-2.0
"""InternVL 3 and 3.5 in Hugging Face's form: InternViT in front of Qwen2, Qwen3 or Llama."""

from megatron.bridge.models.families import (
    LLAVA_NAMES,
    LLAVA_OTHER_NAMES,
    VisionBridge,
    register_bridge,
)


@register_bridge("InternVLForConditionalGeneration", model_type="internvl")
class InternVLBridge(VisionBridge):
    texts = {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "llama": "LlamaForCausalLM",
    }
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES
