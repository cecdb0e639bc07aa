# SPDX-License-Identifier: Apache-2.0
"""Sizes of audio: Whisper's encoder takes stretches of one length, and their features become tokens."""

from collections.abc import Mapping
from typing import Any

AUDIO_MODELS = ("qwen2_audio", "voxtral")
"""Models whose tower encodes audio; in others, the audio part of a checkpoint is copied."""
FRAMES_PER_SECOND = 100
"""Of Whisper's spectrograms: 16,000 samples per second, one frame every 160 samples."""


def takes_audio(vision: Mapping[str, Any]) -> bool:
    """Whether the tower of the config ``vision`` encodes audio."""
    return vision["model_type"] in AUDIO_MODELS


def seconds_of_stretch(vision: Mapping[str, Any]) -> float:
    """Length of the audio that the encoder takes at once, 30 seconds in published models."""
    frames = 2 * vision["audio_config"]["max_source_positions"]  # a convolution halves them
    return frames / FRAMES_PER_SECOND


def tokens_of_stretch(vision: Mapping[str, Any]) -> int:
    """Number of tokens of a stretch without padding."""
    audio = vision["audio_config"]
    positions = audio["max_source_positions"]
    if vision["model_type"] == "voxtral":  # projected in groups, which are as wide as the MLP
        return positions * audio["hidden_size"] // audio["intermediate_size"]
    return positions // 2  # pairs are averaged
