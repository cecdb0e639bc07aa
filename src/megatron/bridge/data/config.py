# SPDX-License-Identifier: Apache-2.0
"""Every dataset config, in one place to import from. This costs no torch."""

from megatron.bridge.data.dataset_config import SPLITS as SPLITS
from megatron.bridge.data.dataset_config import DatasetConfig as DatasetConfig
from megatron.bridge.data.dataset_config import DatasetRequest as DatasetRequest
from megatron.bridge.data.dataset_config import Splits as Splits
from megatron.bridge.data.dataset_config import StreamingDatasetConfig as StreamingDatasetConfig
from megatron.bridge.data.energon.energon_config import EnergonProvider as EnergonProvider
from megatron.bridge.data.finetuning.sft_config import BlendedDatasetConfig as BlendedDatasetConfig
from megatron.bridge.data.finetuning.sft_config import (
    FinetuningDatasetConfig as FinetuningDatasetConfig,
)
from megatron.bridge.data.finetuning.sft_config import HFDatasetConfig as HFDatasetConfig
from megatron.bridge.data.finetuning.sft_config import SFTDatasetConfig as SFTDatasetConfig
from megatron.bridge.data.labels.label_config import (
    ClassificationDatasetConfig as ClassificationDatasetConfig,
)
from megatron.bridge.data.labels.label_config import (
    EmbeddingDatasetConfig as EmbeddingDatasetConfig,
)
from megatron.bridge.data.labels.label_config import RerankDatasetConfig as RerankDatasetConfig
from megatron.bridge.data.labels.label_config import RewardDatasetConfig as RewardDatasetConfig
from megatron.bridge.data.labels.label_config import (
    TokenClassificationDatasetConfig as TokenClassificationDatasetConfig,
)
from megatron.bridge.data.preference.preference_config import (
    PreferenceDatasetConfig as PreferenceDatasetConfig,
)
from megatron.bridge.data.pretraining.gpt_config import FIMConfig as FIMConfig
from megatron.bridge.data.pretraining.gpt_config import GPTDatasetConfig as GPTDatasetConfig
from megatron.bridge.data.pretraining.gpt_config import MockGPTDatasetConfig as MockGPTDatasetConfig
from megatron.bridge.data.prompts.prompt_config import PromptDatasetConfig as PromptDatasetConfig
from megatron.bridge.data.records.record_config import PackedSequenceSpecs as PackedSequenceSpecs
from megatron.bridge.data.records.record_config import RecordDatasetConfig as RecordDatasetConfig
from megatron.bridge.data.vlm_datasets import (
    HFDatasetConversationProvider as HFDatasetConversationProvider,
)
from megatron.bridge.data.vlm_datasets import (
    MockAudioConversationProvider as MockAudioConversationProvider,
)
from megatron.bridge.data.vlm_datasets import (
    MockVLMConversationProvider as MockVLMConversationProvider,
)
from megatron.bridge.data.vlm_datasets import (
    PreloadedVLMConversationProvider as PreloadedVLMConversationProvider,
)
