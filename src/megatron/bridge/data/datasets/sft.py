# SPDX-License-Identifier: Apache-2.0
"""``GPTSFTDataset`` under its public name."""

from megatron.bridge.data.finetuning.gpt_sft_dataset import GPTSFTDataset

__all__ = ["GPTSFTDataset"]
