# SPDX-License-Identifier: Apache-2.0
"""Recipes of the GPT family."""

from megatron.bridge.recipes.gpt.gpt3 import gpt3_175b_pretrain_config

__all__ = ["gpt3_175b_pretrain_config"]
