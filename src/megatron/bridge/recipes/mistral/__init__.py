# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Mistral family."""

from megatron.bridge.recipes.mistral.ministral3 import (
    ministral3_3b_finetune_config,
    ministral3_3b_pretrain_config,
    ministral3_8b_finetune_config,
    ministral3_8b_pretrain_config,
    ministral3_14b_finetune_config,
    ministral3_14b_pretrain_config,
)
from megatron.bridge.recipes.mistral.mistral import (
    mistral_7b_finetune_config,
    mistral_7b_pretrain_config,
    mistral_nemo_12b_finetune_config,
    mistral_nemo_12b_pretrain_config,
    mistral_small_24b_finetune_config,
    mistral_small_24b_pretrain_config,
)
from megatron.bridge.recipes.mistral.mixtral import (
    mixtral_8x7b_finetune_config,
    mixtral_8x7b_pretrain_config,
    mixtral_8x22b_finetune_config,
    mixtral_8x22b_pretrain_config,
)

__all__ = [
    "ministral3_3b_finetune_config",
    "ministral3_3b_pretrain_config",
    "ministral3_8b_finetune_config",
    "ministral3_8b_pretrain_config",
    "ministral3_14b_finetune_config",
    "ministral3_14b_pretrain_config",
    "mistral_7b_finetune_config",
    "mistral_7b_pretrain_config",
    "mistral_nemo_12b_finetune_config",
    "mistral_nemo_12b_pretrain_config",
    "mistral_small_24b_finetune_config",
    "mistral_small_24b_pretrain_config",
    "mixtral_8x7b_finetune_config",
    "mixtral_8x7b_pretrain_config",
    "mixtral_8x22b_finetune_config",
    "mixtral_8x22b_pretrain_config",
]
