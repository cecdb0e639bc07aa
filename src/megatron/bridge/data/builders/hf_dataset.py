# SPDX-License-Identifier: Apache-2.0
"""``HFDatasetConfig`` under its public name."""

from megatron.bridge.data.finetuning.sft_config import HFDatasetConfig

__all__ = ["HFDatasetConfig"]
