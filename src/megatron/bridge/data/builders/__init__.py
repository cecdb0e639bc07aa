# SPDX-License-Identifier: Apache-2.0
"""Datasets of fine-tuning under their public names."""

from megatron.bridge.utils.optional_imports import lazy_names

# names that other programs import from here
__getattr__ = lazy_names(
    __name__,
    {
        "FinetuningDatasetBuilder": "megatron.bridge.compat.dataset_builders:FinetuningDatasetBuilder",
        "HFDatasetBuilder": "megatron.bridge.compat.dataset_builders:HFDatasetBuilder",
    },
)
