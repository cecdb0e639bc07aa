# SPDX-License-Identifier: Apache-2.0
"""Data sets from the files of a folder, under the name that scripts know."""

from megatron.bridge.data.config import BlendedDatasetConfig, FinetuningDatasetConfig, SFTDatasetConfig

__all__ = ["BlendedDatasetConfig", "FinetuningDatasetConfig", "SFTDatasetConfig"]
