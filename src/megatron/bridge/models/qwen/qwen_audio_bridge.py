# SPDX-License-Identifier: Apache-2.0
"""Qwen2-Audio: Whisper's encoder and a linear projector in front of Qwen2's decoder."""

from megatron.bridge.models.families import AudioBridge, register_bridge


@register_bridge("Qwen2AudioForConditionalGeneration", model_type="qwen2_audio")
class Qwen2AudioBridge(AudioBridge):
    texts = {"qwen2": "Qwen2ForCausalLM"}
