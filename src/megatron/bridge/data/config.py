# SPDX-License-Identifier: Apache-2.0
"""Every dataset config, in one place to import from. This costs no torch."""

from megatron.bridge.data.dataset_config import SPLITS, DatasetConfig, DatasetRequest, Splits, StreamingDatasetConfig
from megatron.bridge.data.energon.energon_config import EnergonProvider
from megatron.bridge.data.finetuning.blended_config import BlendedDatasetConfig
from megatron.bridge.data.finetuning.hf_config import HFDatasetConfig
from megatron.bridge.data.finetuning.sft_config import FinetuningDatasetConfig, SFTDatasetConfig
from megatron.bridge.data.labels.label_config import (
    ClassificationDatasetConfig,
    EmbeddingDatasetConfig,
    RewardDatasetConfig,
    TokenClassificationDatasetConfig,
)
from megatron.bridge.data.preference.preference_config import PreferenceDatasetConfig
from megatron.bridge.data.pretraining.gpt_config import FIMConfig, GPTDatasetConfig
from megatron.bridge.data.pretraining.mock_config import MockGPTDatasetConfig
from megatron.bridge.data.records.record_config import PackedSequenceSpecs, RecordDatasetConfig
from megatron.bridge.data.vlm_datasets import (
    HFDatasetConversationProvider,
    MockVLMConversationProvider,
    PreloadedVLMConversationProvider,
)

__all__ = [
    "SPLITS",
    "BlendedDatasetConfig",
    "ClassificationDatasetConfig",
    "DatasetConfig",
    "DatasetRequest",
    "EmbeddingDatasetConfig",
    "EnergonProvider",
    "FIMConfig",
    "FinetuningDatasetConfig",
    "GPTDatasetConfig",
    "HFDatasetConfig",
    "HFDatasetConversationProvider",
    "MockGPTDatasetConfig",
    "MockVLMConversationProvider",
    "PackedSequenceSpecs",
    "PreferenceDatasetConfig",
    "PreloadedVLMConversationProvider",
    "RecordDatasetConfig",
    "RewardDatasetConfig",
    "SFTDatasetConfig",
    "Splits",
    "StreamingDatasetConfig",
    "TokenClassificationDatasetConfig",
]
