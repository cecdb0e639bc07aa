# SPDX-License-Identifier: Apache-2.0
"""Llama 3, whose config Llama 3.1 to 3.3 share.

Learning rates are from "The Llama 3 Herd of Models" (2024), table 3.
"""

from typing import Unpack

from megatron.bridge.recipes.builders import finetune_recipe, pretrain, pretrain_recipe
from megatron.bridge.recipes.options import (
    FP8,
    FP8_BLOCKWISE,
    LENGTH_16K,
    LENGTH_64K,
    LENGTH_128K,
    MXFP8,
    NVFP4,
    LowPrecision,
    PretrainOptions,
    layout,
)
from megatron.bridge.training.config import ConfigContainer

LLAMA3_8B = "meta-llama/Meta-Llama-3-8B"
LLAMA3_70B = "meta-llama/Meta-Llama-3-70B"
_PRETRAIN_8B: PretrainOptions = {"seq_length": 8192, "lr": 3e-4}
_PRETRAIN_70B: PretrainOptions = {"seq_length": 8192, "lr": 1.5e-4, "min_lr": 1.5e-6}

llama3_8b_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, layout(tp=2))
"""Llama 3 8B pretraining, 8 x H100 80GB: 58 GB each, TP2."""
llama3_8b_16k_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, LENGTH_16K, layout(tp=2, cp=2))
"""Llama 3 8B pretraining on 16k tokens, 16 x H100 80GB: 53 GB each, TP2 CP2."""
llama3_8b_64k_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, LENGTH_64K, layout(tp=4, cp=2))
"""Llama 3 8B pretraining on 64k tokens, 32 x H100 80GB: 61 GB each, TP4 CP2."""
llama3_8b_128k_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, LENGTH_128K, layout(tp=4, cp=4))
"""Llama 3 8B pretraining on 128k tokens, 64 x H100 80GB: 61 GB each, TP4 CP4."""
llama3_70b_pretrain_config = pretrain_recipe(LLAMA3_70B, _PRETRAIN_70B, layout(tp=8, pp=2))
"""Llama 3 70B pretraining, 64 x H100 80GB: 65 GB each, TP8 PP2."""
llama3_70b_16k_pretrain_config = pretrain_recipe(LLAMA3_70B, _PRETRAIN_70B, LENGTH_16K, layout(tp=8, pp=2, cp=2))
"""Llama 3 70B pretraining on 16k tokens, 128 x H100 80GB: 59 GB each, TP8 PP2 CP2."""
llama3_70b_64k_pretrain_config = pretrain_recipe(LLAMA3_70B, _PRETRAIN_70B, LENGTH_64K, layout(tp=8, pp=2, cp=8))
"""Llama 3 70B pretraining on 64k tokens, 256 x H100 80GB: 57 GB each, TP8 PP2 CP8."""
llama3_70b_128k_pretrain_config = pretrain_recipe(LLAMA3_70B, _PRETRAIN_70B, LENGTH_128K, layout(tp=8, pp=2, cp=16))
"""Llama 3 70B pretraining on 128k tokens, 512 x H100 80GB: 58 GB each, TP8 PP2 CP16."""
llama3_8b_fp8_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, FP8, layout(tp=2))
"""Llama 3 8B pretraining in FP8, 8 x H100 80GB: 65 GB each, TP2."""
llama3_8b_fp8_blockwise_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, FP8_BLOCKWISE, layout(tp=2))
"""Llama 3 8B pretraining in blockwise FP8, 8 x H100 80GB: 65 GB each, TP2."""
llama3_8b_mxfp8_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, MXFP8)
"""Llama 3 8B pretraining in MXFP8, 8 x B200 180GB: 118 GB each, no model parallelism."""
llama3_8b_nvfp4_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, NVFP4)
"""Llama 3 8B pretraining in NVFP4, 8 x B200 180GB: 111 GB each, no model parallelism."""


def llama3_8b_low_precision_pretrain_config(
    mixed_precision_recipe: LowPrecision = "bf16_with_fp8_current_scaling_mixed", **options: Unpack[PretrainOptions]
) -> ConfigContainer:
    """Llama 3 8B pretraining in a low precision, 8 x H100 80GB: 65 GB each, TP2.

    Args:
        mixed_precision_recipe: The precision; the option ``precision`` overrides it.
        **options: The options of all pretraining recipes.
    """
    return pretrain(LLAMA3_8B, options, _PRETRAIN_8B, layout(tp=2), precision=mixed_precision_recipe)


llama3_70b_fp8_pretrain_config = pretrain_recipe(LLAMA3_70B, _PRETRAIN_70B, FP8, layout(tp=8, pp=4, vp=5))
"""Llama 3 70B pretraining in FP8, 64 x H100 80GB: 60 GB each, TP8 PP4."""
llama3_70b_fp8_blockwise_pretrain_config = pretrain_recipe(
    LLAMA3_70B, _PRETRAIN_70B, FP8_BLOCKWISE, layout(tp=8, pp=4, vp=5)
)
"""Llama 3 70B pretraining in blockwise FP8, 64 x H100 80GB: 60 GB each, TP8 PP4."""
llama3_70b_mxfp8_pretrain_config = pretrain_recipe(LLAMA3_70B, _PRETRAIN_70B, MXFP8, layout(tp=4, pp=2))
"""Llama 3 70B pretraining in MXFP8, 64 x B200 180GB: 132 GB each, TP4 PP2."""
llama3_70b_nvfp4_pretrain_config = pretrain_recipe(LLAMA3_70B, _PRETRAIN_70B, NVFP4, layout(tp=4, pp=2))
"""Llama 3 70B pretraining in NVFP4, 64 x B200 180GB: 124 GB each, TP4 PP2."""

llama3_8b_finetune_config = finetune_recipe(LLAMA3_8B, layout(tp=2))
"""Llama 3 8B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
llama3_70b_finetune_config = finetune_recipe(LLAMA3_70B, layout(tp=8, pp=2))
"""Llama 3 70B full fine-tuning, 32 x H100 80GB: 66 GB each, TP8 PP2."""
