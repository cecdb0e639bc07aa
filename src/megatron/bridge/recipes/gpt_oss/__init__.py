# SPDX-License-Identifier: Apache-2.0
"""Recipes of the gpt-oss family."""

from megatron.bridge.recipes.gpt_oss.gpt_oss import (
    gpt_oss_20b_finetune_config,
    gpt_oss_20b_pretrain_config,
    gpt_oss_120b_finetune_config,
    gpt_oss_120b_pretrain_config,
)

__all__ = [
    "gpt_oss_20b_finetune_config",
    "gpt_oss_20b_pretrain_config",
    "gpt_oss_120b_finetune_config",
    "gpt_oss_120b_pretrain_config",
]
