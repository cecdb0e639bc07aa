# SPDX-License-Identifier: Apache-2.0
"""Recipes of the OLMo family."""

from megatron.bridge.recipes.olmo.olmoe import olmoe_7b_finetune_config, olmoe_7b_pretrain_config

__all__ = ["olmoe_7b_finetune_config", "olmoe_7b_pretrain_config"]
