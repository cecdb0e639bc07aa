# SPDX-License-Identifier: Apache-2.0
"""SmolVLM and SmolVLM2: SigLIP in front of SmolLM2, small enough for a laptop."""

from megatron.bridge.models.families import *

_PARTS = ("vision_model", "connector")


@register_bridge("SmolVLMForConditionalGeneration", model_type="smolvlm")
class SmolVLMBridge(VisionBridge):
    texts = {"llama": "LlamaForCausalLM"}
    tower = _PARTS
    language = "text_model"
    text_ignored = (
        *("_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor"),
        *("qk_layer_norms", "use_resampler"),
    )
    names = {"model.": "model.text_model.", **{f"{part}.": f"model.{part}." for part in _PARTS}}


@register_bridge("Idefics3ForConditionalGeneration", model_type="idefics3")
class Idefics3Bridge(SmolVLMBridge):
    """SmolVLM: SigLIP in front of SmolLM2, small enough for a laptop."""
