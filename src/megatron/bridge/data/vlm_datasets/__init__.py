# SPDX-License-Identifier: Apache-2.0
"""Datasets of conversations with images or audio, under their public names."""

from megatron.bridge.data.vlm_datasets.audio import MockAudioConversationProvider
from megatron.bridge.data.vlm_datasets.providers import (
    HFDatasetConversationProvider,
    MockVLMConversationProvider,
    PreloadedVLMConversationProvider,
)

__all__ = [
    "HFDatasetConversationProvider",
    "MockAudioConversationProvider",
    "MockVLMConversationProvider",
    "PreloadedVLMConversationProvider",
]
