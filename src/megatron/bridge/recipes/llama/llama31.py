# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1: Llama 3 with 128k positions, and 405B.

Learning rates are from "The Llama 3 Herd of Models" (2024), table 3. The 126 layers of 405B do not divide evenly
into stages; with the embedding and the loss they count as 128.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import FP8, LENGTH_128K, MXFP8, NVFP4, PretrainOptions, layout

LLAMA31_70B = "meta-llama/Llama-3.1-70B"
LLAMA31_405B = "meta-llama/Llama-3.1-405B"
_PRETRAIN_70B: PretrainOptions = {"seq_length": 8192, "lr": 1.5e-4, "min_lr": 1.5e-6}
_PRETRAIN_405B: PretrainOptions = {
    "seq_length": 8192,
    "lr": 8e-5,
    "min_lr": 8e-7,
    "embedding_and_loss_are_layers": True,
}

llama31_8b_pretrain_config = pretrain_recipe("meta-llama/Llama-3.1-8B", layout(tp=2), seq_length=8192, lr=3e-4)
"""Llama 3.1 8B pretraining, 8 x H100 80GB: 58 GB each, TP2."""
llama31_70b_pretrain_config = pretrain_recipe(LLAMA31_70B, _PRETRAIN_70B, layout(tp=8, pp=2))
"""Llama 3.1 70B pretraining, 64 x H100 80GB: 65 GB each, TP8 PP2."""
llama31_405b_pretrain_config = pretrain_recipe(LLAMA31_405B, _PRETRAIN_405B, layout(tp=8, pp=8, vp=4, cp=4))
"""Llama 3.1 405B pretraining, 1024 x H100 80GB: 66 GB each, TP8 PP8 CP4."""
llama31_8b_128k_pretrain_config = pretrain_recipe("meta-llama/Llama-3.1-8B", LENGTH_128K, layout(tp=4, cp=4), lr=3e-4)
"""Llama 3.1 8B pretraining on 128k tokens, 64 x H100 80GB: 61 GB each, TP4 CP4."""
llama31_70b_128k_pretrain_config = pretrain_recipe(LLAMA31_70B, _PRETRAIN_70B, LENGTH_128K, layout(tp=8, pp=2, cp=16))
"""Llama 3.1 70B pretraining on 128k tokens, 512 x H100 80GB: 58 GB each, TP8 PP2 CP16."""
llama31_405b_128k_pretrain_config = pretrain_recipe(
    LLAMA31_405B, _PRETRAIN_405B, LENGTH_128K, layout(tp=8, pp=8, vp=4, cp=4), recompute="full"
)
"""Llama 3.1 405B pretraining on 128k tokens, 1024 x H100 80GB: 66 GB each, TP8 PP8 CP4."""
llama31_405b_fp8_pretrain_config = pretrain_recipe(LLAMA31_405B, _PRETRAIN_405B, FP8, layout(tp=8, pp=16, vp=4, cp=4))
"""Llama 3.1 405B pretraining in FP8, 1024 x H100 80GB: 54 GB each, TP8 PP16 CP4."""
llama31_405b_mxfp8_pretrain_config = pretrain_recipe(LLAMA31_405B, _PRETRAIN_405B, MXFP8, layout(tp=8, pp=8, vp=8))
"""Llama 3.1 405B pretraining in MXFP8, 512 x B200 180GB: 141 GB each, TP8 PP8."""
llama31_405b_nvfp4_pretrain_config = pretrain_recipe(LLAMA31_405B, _PRETRAIN_405B, NVFP4, layout(tp=8, pp=8, vp=8))
"""Llama 3.1 405B pretraining in NVFP4, 512 x B200 180GB: 134 GB each, TP8 PP8."""

llama31_8b_finetune_config = finetune_recipe("meta-llama/Llama-3.1-8B", layout(tp=2))
"""Llama 3.1 8B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
llama31_70b_finetune_config = finetune_recipe(LLAMA31_70B, layout(tp=8, pp=2))
"""Llama 3.1 70B full fine-tuning, 32 x H100 80GB: 66 GB each, TP8 PP2."""
llama31_405b_finetune_config = finetune_recipe(
    LLAMA31_405B, layout(tp=8, pp=16, vp=4, cp=2), embedding_and_loss_are_layers=True
)
"""Llama 3.1 405B full fine-tuning, 256 x H100 80GB: 61 GB each, TP8 PP16 CP2."""
