# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Nemotron family."""

from megatron.bridge.recipes.nemotron.nemotron4 import (
    minitron_4b_finetune_config,
    minitron_4b_pretrain_config,
    minitron_8b_finetune_config,
    minitron_8b_pretrain_config,
    nemotron4_15b_finetune_config,
    nemotron4_15b_pretrain_config,
    nemotron4_340b_finetune_config,
    nemotron4_340b_pretrain_config,
)

__all__ = [
    "minitron_4b_finetune_config",
    "minitron_4b_pretrain_config",
    "minitron_8b_finetune_config",
    "minitron_8b_pretrain_config",
    "nemotron4_15b_finetune_config",
    "nemotron4_15b_pretrain_config",
    "nemotron4_340b_finetune_config",
    "nemotron4_340b_pretrain_config",
]
