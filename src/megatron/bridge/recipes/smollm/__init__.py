# SPDX-License-Identifier: Apache-2.0
"""Recipes of the SmolLM family."""

from megatron.bridge.recipes.smollm.smollm2 import (
    smollm2_1p7b_finetune_config,
    smollm2_1p7b_pretrain_config,
    smollm2_50m_distill_config,
    smollm2_135m_finetune_config,
    smollm2_135m_pretrain_config,
    smollm2_360m_finetune_config,
    smollm2_360m_pretrain_config,
)
from megatron.bridge.recipes.smollm.smollm3 import smollm3_3b_finetune_config, smollm3_3b_pretrain_config

__all__ = [
    "smollm2_1p7b_finetune_config",
    "smollm2_1p7b_pretrain_config",
    "smollm2_50m_distill_config",
    "smollm2_135m_finetune_config",
    "smollm2_135m_pretrain_config",
    "smollm2_360m_finetune_config",
    "smollm2_360m_pretrain_config",
    "smollm3_3b_finetune_config",
    "smollm3_3b_pretrain_config",
]
