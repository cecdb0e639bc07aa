# SPDX-License-Identifier: Apache-2.0
"""Datasets of conversations with images, under their public names."""

from megatron.bridge.data.vlm_datasets.hf_provider import HFDatasetConversationProvider
from megatron.bridge.data.vlm_datasets.mock_provider import MockVLMConversationProvider
from megatron.bridge.data.vlm_datasets.preloaded_provider import PreloadedVLMConversationProvider

__all__ = ["HFDatasetConversationProvider", "MockVLMConversationProvider", "PreloadedVLMConversationProvider"]
