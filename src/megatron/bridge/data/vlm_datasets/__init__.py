# SPDX-License-Identifier: Apache-2.0
"""Datasets of conversations with images, under their public names."""

from megatron.bridge.data.vlm_datasets.providers import (
    HFDatasetConversationProvider,
    MockVLMConversationProvider,
    PreloadedVLMConversationProvider,
)

__all__ = [
    "HFDatasetConversationProvider",
    "MockVLMConversationProvider",
    "PreloadedVLMConversationProvider",
]
