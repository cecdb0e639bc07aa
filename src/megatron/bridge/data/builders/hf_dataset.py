# SPDX-License-Identifier: Apache-2.0
"""``HFDatasetConfig`` under its public name."""

from megatron.bridge.data.finetuning.sft_config import HFDatasetConfig
from megatron.bridge.utils.optional_imports import lazy_names

__all__ = ["HFDatasetConfig"]

# names that other programs import from here
__getattr__ = lazy_names(
    __name__,
    {
        "HFDatasetBuilder": "megatron.bridge.compat.dataset_builders:HFDatasetBuilder",
    },
)
