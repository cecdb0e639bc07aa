# SPDX-License-Identifier: Apache-2.0
"""Mistral Small 3.1 and 3.2, Ministral 3: the text model; the vision tower is carried over."""

from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.text_model import TextPartBridge
from megatron.bridge.models.conversion.model_bridge import register_bridge

_MODEL = "language_model.model"


@register_bridge("Mistral3ForConditionalGeneration", model_type="mistral3")
class Mistral3Bridge(TextPartBridge):
    """The text part of Hugging Face's ``Mistral3ForConditionalGeneration`` and Megatron's ``GPTModel``."""

    texts = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
    other_keys = (
        "vision_config",
        "vision_feature_layer",
        "image_token_index",
        "spatial_merge_size",
        "projector_hidden_act",
        "multimodal_projector_bias",
    )
    carried = ("vision_tower.**", "multi_modal_projector.**")
    weights = (
        ends(f"{_MODEL}.embed_tokens.weight", f"{_MODEL}.norm", "language_model.lm_head.weight"),
        attention(f"{_MODEL}.layers.*"),
        mlp(f"{_MODEL}.layers.*"),
    )
