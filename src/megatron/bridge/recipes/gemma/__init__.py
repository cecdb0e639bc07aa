# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Gemma family."""

from megatron.bridge.recipes.gemma.gemma import (
    gemma_2b_finetune_config,
    gemma_2b_pretrain_config,
    gemma_7b_finetune_config,
    gemma_7b_pretrain_config,
)
from megatron.bridge.recipes.gemma.gemma2 import (
    gemma2_2b_finetune_config,
    gemma2_2b_pretrain_config,
    gemma2_9b_finetune_config,
    gemma2_9b_pretrain_config,
    gemma2_27b_finetune_config,
    gemma2_27b_pretrain_config,
)
from megatron.bridge.recipes.gemma.gemma3 import (
    gemma3_1b_finetune_config,
    gemma3_1b_pretrain_config,
    gemma3_4b_finetune_config,
    gemma3_4b_pretrain_config,
    gemma3_12b_finetune_config,
    gemma3_12b_pretrain_config,
    gemma3_27b_finetune_config,
    gemma3_27b_pretrain_config,
)

__all__ = [
    "gemma2_2b_finetune_config",
    "gemma2_2b_pretrain_config",
    "gemma2_9b_finetune_config",
    "gemma2_9b_pretrain_config",
    "gemma2_27b_finetune_config",
    "gemma2_27b_pretrain_config",
    "gemma3_1b_finetune_config",
    "gemma3_1b_pretrain_config",
    "gemma3_4b_finetune_config",
    "gemma3_4b_pretrain_config",
    "gemma3_12b_finetune_config",
    "gemma3_12b_pretrain_config",
    "gemma3_27b_finetune_config",
    "gemma3_27b_pretrain_config",
    "gemma_2b_finetune_config",
    "gemma_2b_pretrain_config",
    "gemma_7b_finetune_config",
    "gemma_7b_pretrain_config",
]
