# SPDX-License-Identifier: Apache-2.0
"""Voxtral: Whisper's encoder, whose frames are projected in groups, in front of Llama's decoder."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.families import AudioBridge, register_bridge


@register_bridge("VoxtralForConditionalGeneration", model_type="voxtral")
class VoxtralBridge(AudioBridge):
    texts = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    irrelevant = {"head_dim": None, "num_key_value_heads": None}  # of the tower, not read

    def _text_config(self, full_config: Mapping[str, Any]) -> dict[str, Any]:
        text = super()._text_config(full_config)
        if text["model_type"] == "llama":
            text.pop("sliding_window", None)  # transformers' Llama does not read it
        return text
