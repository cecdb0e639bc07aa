# SPDX-License-Identifier: Apache-2.0
"""Recipes of the DeepSeek family."""

from megatron.bridge.recipes.deepseek.deepseek_v2 import (
    deepseek_v2_finetune_config,
    deepseek_v2_lite_finetune_config,
    deepseek_v2_lite_pretrain_config,
    deepseek_v2_pretrain_config,
)
from megatron.bridge.recipes.deepseek.deepseek_v3 import (
    deepseek_v3_finetune_config,
    deepseek_v3_fp8_blockwise_pretrain_config,
    deepseek_v3_mxfp8_pretrain_config,
    deepseek_v3_pretrain_config,
    deepseek_v3_pretrain_config_32nodes,
)

__all__ = [
    "deepseek_v2_finetune_config",
    "deepseek_v2_lite_finetune_config",
    "deepseek_v2_lite_pretrain_config",
    "deepseek_v2_pretrain_config",
    "deepseek_v3_finetune_config",
    "deepseek_v3_fp8_blockwise_pretrain_config",
    "deepseek_v3_mxfp8_pretrain_config",
    "deepseek_v3_pretrain_config",
    "deepseek_v3_pretrain_config_32nodes",
]
