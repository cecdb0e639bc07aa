# SPDX-License-Identifier: Apache-2.0
"""Recipes of the SmolLM family."""

from megatron.bridge.recipes.smollm.smollm2 import smollm2_135m_finetune_config, smollm2_135m_pretrain_config

__all__ = ["smollm2_135m_finetune_config", "smollm2_135m_pretrain_config"]
