# SPDX-License-Identifier: Apache-2.0
"""SmolLM3, and the SmolVLMs; SmolLM2 is a Llama."""

from megatron.bridge.models.families import (
    BIASES,
    DENSE,
    LLAMA_LIKE,
    NO_ROPE_LAYERS,
    SWITCHED_WINDOWS,
    DecoderBridge,
    VisionBridge,
    attention,
    ends,
    mlp,
    register_bridge,
)


@register_bridge("SmolLM3ForCausalLM", model_type="smollm3")
class SmolLM3Bridge(DecoderBridge):
    """SmolLM3: Llama's layers, every few of them without a rotary embedding."""

    fields = (*DENSE, *BIASES, *SWITCHED_WINDOWS, NO_ROPE_LAYERS)
    fixed = LLAMA_LIKE
    # what no_rope_layers and layer_types, which transformers always fills in, are made from
    irrelevant = {"no_rope_layer_interval": None, "max_window_layers": None}
    weights = (ends(), attention(), mlp())


_PARTS = ("vision_model", "connector")


@register_bridge("SmolVLMForConditionalGeneration", model_type="smolvlm")
class SmolVLMBridge(VisionBridge):
    """SmolVLM and SmolVLM2: SigLIP in front of SmolLM2, small enough for a laptop."""

    texts = {"llama": "LlamaForCausalLM"}
    tower = _PARTS
    language = "text_model"
    text_ignored = (
        "_flash_attn_2_enabled",
        "neftune_noise_alpha",
        "perceiver_config",
        "pixel_shuffle_factor",
        "qk_layer_norms",
        "use_resampler",
    )
    names = {"model.": "model.text_model.", **{f"{part}.": f"model.{part}." for part in _PARTS}}


@register_bridge("Idefics3ForConditionalGeneration", model_type="idefics3")
class Idefics3Bridge(SmolVLMBridge):
    """SmolVLM: SigLIP in front of SmolLM2, small enough for a laptop."""
