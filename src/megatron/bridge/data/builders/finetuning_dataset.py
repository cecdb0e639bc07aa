# SPDX-License-Identifier: Apache-2.0
"""Configs of fine-tuning datasets under their public names."""

from megatron.bridge.data.config import (
    BlendedDatasetConfig,
    FinetuningDatasetConfig,
    SFTDatasetConfig,
)
from megatron.bridge.utils.optional_imports import lazy_names

__all__ = ["BlendedDatasetConfig", "FinetuningDatasetConfig", "SFTDatasetConfig"]

# names that other programs import from here
__getattr__ = lazy_names(
    __name__,
    {
        "FinetuningDatasetBuilder": "megatron.bridge.compat.dataset_builders:FinetuningDatasetBuilder",
    },
)
