# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Llama family."""

from typing import Unpack

from megatron.bridge.recipes.builders import dpo_recipe, finetune_recipe, pretrain, pretrain_recipe
from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.options import (
    FP8,
    FP8_BLOCKWISE,
    LENGTH_16K,
    LENGTH_64K,
    LENGTH_128K,
    MXFP8,
    NVFP4,
    LayoutOptions,
    LowPrecision,
    PretrainOptions,
    layout,
)
from megatron.bridge.training.config import ConfigContainer

# Llama 2. Learning rates and batch size are from "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023).

LLAMA2_7B = "meta-llama/Llama-2-7b-hf"

llama2_7b_pretrain_config = pretrain_recipe(
    LLAMA2_7B, seq_length=4096, global_batch_size=1024, lr=3e-4, min_lr=3e-5
)
llama2_13b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-2-13b-hf",
    layout(tp=2),
    seq_length=4096,
    global_batch_size=1024,
    lr=3e-4,
    min_lr=3e-5,
)
llama2_70b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-2-70b-hf",
    layout(tp=8, pp=2),
    seq_length=4096,
    global_batch_size=1024,
    lr=1.5e-4,
    min_lr=1.5e-5,
)

llama2_7b_finetune_config = finetune_recipe(LLAMA2_7B)
llama2_13b_finetune_config = finetune_recipe("meta-llama/Llama-2-13b-hf", layout(tp=4))
llama2_70b_finetune_config = finetune_recipe("meta-llama/Llama-2-70b-hf", layout(tp=8, pp=2))

# Llama 3, whose config Llama 3.1 to 3.3 share.
#
# Learning rates are from "The Llama 3 Herd of Models" (2024), table 3.

LLAMA3_8B = "meta-llama/Meta-Llama-3-8B"
LLAMA3_70B = "meta-llama/Meta-Llama-3-70B"
_PRETRAIN_8B: PretrainOptions = {"seq_length": 8192, "lr": 3e-4}
_PRETRAIN_70B: PretrainOptions = {"seq_length": 8192, "lr": 1.5e-4, "min_lr": 1.5e-6}

llama3_8b_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, layout(tp=2))
llama3_8b_16k_pretrain_config = pretrain_recipe(
    LLAMA3_8B, _PRETRAIN_8B, LENGTH_16K, layout(tp=2, cp=2)
)
llama3_8b_64k_pretrain_config = pretrain_recipe(
    LLAMA3_8B, _PRETRAIN_8B, LENGTH_64K, layout(tp=4, cp=2)
)
llama3_8b_128k_pretrain_config = pretrain_recipe(
    LLAMA3_8B, _PRETRAIN_8B, LENGTH_128K, layout(tp=4, cp=4)
)
llama3_70b_pretrain_config = pretrain_recipe(LLAMA3_70B, _PRETRAIN_70B, layout(tp=8, pp=2))
llama3_70b_16k_pretrain_config = pretrain_recipe(
    LLAMA3_70B, _PRETRAIN_70B, LENGTH_16K, layout(tp=8, pp=2, cp=2)
)
llama3_70b_64k_pretrain_config = pretrain_recipe(
    LLAMA3_70B, _PRETRAIN_70B, LENGTH_64K, layout(tp=8, pp=2, cp=8)
)
llama3_70b_128k_pretrain_config = pretrain_recipe(
    LLAMA3_70B, _PRETRAIN_70B, LENGTH_128K, layout(tp=8, pp=2, cp=16)
)
llama3_8b_fp8_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, FP8, layout(tp=2))
llama3_8b_fp8_blockwise_pretrain_config = pretrain_recipe(
    LLAMA3_8B, _PRETRAIN_8B, FP8_BLOCKWISE, layout(tp=2)
)
llama3_8b_mxfp8_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, MXFP8)
llama3_8b_nvfp4_pretrain_config = pretrain_recipe(LLAMA3_8B, _PRETRAIN_8B, NVFP4)


def llama3_8b_low_precision_pretrain_config(
    mixed_precision_recipe: LowPrecision = "bf16_with_fp8_current_scaling_mixed",
    **options: Unpack[PretrainOptions],
) -> ConfigContainer:
    # the option ``precision`` overrides the argument
    return pretrain(
        LLAMA3_8B, options, _PRETRAIN_8B, layout(tp=2), precision=mixed_precision_recipe
    )


llama3_70b_fp8_pretrain_config = pretrain_recipe(
    LLAMA3_70B, _PRETRAIN_70B, FP8, layout(tp=8, pp=4, vp=5)
)
llama3_70b_fp8_blockwise_pretrain_config = pretrain_recipe(
    LLAMA3_70B, _PRETRAIN_70B, FP8_BLOCKWISE, layout(tp=8, pp=4, vp=5)
)
llama3_70b_mxfp8_pretrain_config = pretrain_recipe(
    LLAMA3_70B, _PRETRAIN_70B, MXFP8, layout(tp=4, pp=2)
)
llama3_70b_nvfp4_pretrain_config = pretrain_recipe(
    LLAMA3_70B, _PRETRAIN_70B, NVFP4, layout(tp=4, pp=2)
)

llama3_8b_finetune_config = finetune_recipe(LLAMA3_8B, layout(tp=2))
llama3_70b_finetune_config = finetune_recipe(LLAMA3_70B, layout(tp=8, pp=2))

# Llama 3.1: Llama 3 with 128k positions, and 405B.
#
# Learning rates are from "The Llama 3 Herd of Models" (2024), table 3. The 126 layers of 405B do not divide evenly
# into stages; with the embedding and the loss they count as 128.

LLAMA31_70B = "meta-llama/Llama-3.1-70B"
LLAMA31_405B = "meta-llama/Llama-3.1-405B"
_PRETRAIN_405B: PretrainOptions = {
    "seq_length": 8192,
    "lr": 8e-5,
    "min_lr": 8e-7,
    "embedding_and_loss_are_layers": True,
}

llama31_8b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.1-8B", layout(tp=2), seq_length=8192, lr=3e-4
)
llama31_70b_pretrain_config = pretrain_recipe(LLAMA31_70B, _PRETRAIN_70B, layout(tp=8, pp=2))
llama31_405b_pretrain_config = pretrain_recipe(
    LLAMA31_405B, _PRETRAIN_405B, layout(tp=8, pp=8, vp=4, cp=4)
)
llama31_8b_128k_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.1-8B", LENGTH_128K, layout(tp=4, cp=4), lr=3e-4
)
llama31_70b_128k_pretrain_config = pretrain_recipe(
    LLAMA31_70B, _PRETRAIN_70B, LENGTH_128K, layout(tp=8, pp=2, cp=16)
)
llama31_405b_128k_pretrain_config = pretrain_recipe(
    LLAMA31_405B, _PRETRAIN_405B, LENGTH_128K, layout(tp=8, pp=8, vp=4, cp=4), recompute="full"
)
llama31_405b_fp8_pretrain_config = pretrain_recipe(
    LLAMA31_405B, _PRETRAIN_405B, FP8, layout(tp=8, pp=16, vp=4, cp=4)
)
llama31_405b_mxfp8_pretrain_config = pretrain_recipe(
    LLAMA31_405B, _PRETRAIN_405B, MXFP8, layout(tp=8, pp=8, vp=8)
)
llama31_405b_nvfp4_pretrain_config = pretrain_recipe(
    LLAMA31_405B, _PRETRAIN_405B, NVFP4, layout(tp=8, pp=8, vp=8)
)

llama31_8b_finetune_config = finetune_recipe("meta-llama/Llama-3.1-8B", layout(tp=2))
llama31_70b_finetune_config = finetune_recipe(LLAMA31_70B, layout(tp=8, pp=2))
llama31_405b_finetune_config = finetune_recipe(
    LLAMA31_405B, layout(tp=8, pp=16, vp=4, cp=2), embedding_and_loss_are_layers=True
)

# Llama 3.2 and Llama 3.3, a further-trained 3.1 70B. The learning rates of Llama 3.2 are our own.

llama32_1b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.2-1B", seq_length=8192, lr=5e-4, min_lr=5e-6
)
llama32_3b_pretrain_config = pretrain_recipe("meta-llama/Llama-3.2-3B", seq_length=8192, lr=3e-4)
llama33_70b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.3-70B-Instruct",
    layout(tp=8, pp=2),
    seq_length=8192,
    lr=1.5e-4,
    min_lr=1.5e-6,
)

llama32_1b_finetune_config = finetune_recipe("meta-llama/Llama-3.2-1B", lr=1e-5)
llama32_1b_dpo_config = dpo_recipe("meta-llama/Llama-3.2-1B", lr=1e-6)
llama32_3b_finetune_config = finetune_recipe("meta-llama/Llama-3.2-3B", lr=1e-5)
llama33_70b_finetune_config = finetune_recipe(
    "meta-llama/Llama-3.3-70B-Instruct", layout(tp=8, pp=2)
)

# The text model of Llama 4. Learning rates are our own.

LLAMA4_SCOUT_109B = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
_LAYOUT: LayoutOptions = layout(tp=2, pp=4, ep=8, etp=1)

llama4_scout_109b_pretrain_config = pretrain_recipe(
    LLAMA4_SCOUT_109B, _LAYOUT, seq_length=4096, lr=2e-4
)
llama4_scout_109b_finetune_config = finetune_recipe(LLAMA4_SCOUT_109B, _LAYOUT)

name_functions(__name__)
