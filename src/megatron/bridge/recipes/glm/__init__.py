# SPDX-License-Identifier: Apache-2.0
"""Recipes of the GLM family."""

from megatron.bridge.recipes.glm.glm4 import (
    glm4_9b_finetune_config,
    glm4_9b_pretrain_config,
    glm4_32b_finetune_config,
    glm4_32b_pretrain_config,
)
from megatron.bridge.recipes.glm.glm45 import (
    glm45_355b_finetune_config,
    glm45_355b_pretrain_config,
    glm45_air_106b_finetune_config,
    glm45_air_106b_pretrain_config,
)

__all__ = [
    "glm4_9b_finetune_config",
    "glm4_9b_pretrain_config",
    "glm4_32b_finetune_config",
    "glm4_32b_pretrain_config",
    "glm45_355b_finetune_config",
    "glm45_355b_pretrain_config",
    "glm45_air_106b_finetune_config",
    "glm45_air_106b_pretrain_config",
]
