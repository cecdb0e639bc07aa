# SPDX-License-Identifier: Apache-2.0
"""Configs of fine-tuning datasets under their public names."""

from megatron.bridge.data.config import (
    BlendedDatasetConfig,
    FinetuningDatasetConfig,
    SFTDatasetConfig,
)

__all__ = ["BlendedDatasetConfig", "FinetuningDatasetConfig", "SFTDatasetConfig"]
