# SPDX-License-Identifier: Apache-2.0
"""Voxtral: Whisper's encoder, whose frames are projected in groups, in front of Llama's decoder."""

from megatron.bridge.models.families import AudioBridge, register_bridge


@register_bridge("VoxtralForConditionalGeneration", model_type="voxtral")
class VoxtralBridge(AudioBridge):
    texts = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
