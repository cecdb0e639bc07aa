# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Moonshot family."""

from megatron.bridge.recipes.moonshot.kimi_k2 import kimi_k2_finetune_config, kimi_k2_pretrain_config
from megatron.bridge.recipes.moonshot.moonlight import moonlight_16b_finetune_config, moonlight_16b_pretrain_config

__all__ = [
    "kimi_k2_finetune_config",
    "kimi_k2_pretrain_config",
    "moonlight_16b_finetune_config",
    "moonlight_16b_pretrain_config",
]
