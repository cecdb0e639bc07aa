# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 with experts. Learning rates are our own: none are published.

The 94 layers of 235B-A22B do not divide evenly into stages; with the embedding and the loss they count as 96.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import FP8, MXFP8, PretrainOptions, layout

QWEN3_30B_A3B = "Qwen/Qwen3-30B-A3B"
QWEN3_235B_A22B = "Qwen/Qwen3-235B-A22B"
_PRETRAIN_235B: PretrainOptions = {
    "seq_length": 4096,
    "global_batch_size": 1024,
    "lr": 1.5e-4,
    "min_lr": 1.5e-6,
    "embedding_and_loss_are_layers": True,
}
_PRETRAIN_30B: PretrainOptions = {"seq_length": 4096, "lr": 3e-4}

qwen3_30b_a3b_pretrain_config = pretrain_recipe(QWEN3_30B_A3B, _PRETRAIN_30B, layout(tp=2, ep=8, etp=1))
"""Qwen 3 30B-A3B pretraining, 16 x H100 80GB: 64 GB each, TP2 EP8."""
qwen3_235b_a22b_pretrain_config = pretrain_recipe(
    QWEN3_235B_A22B, _PRETRAIN_235B, layout(tp=4, pp=8, vp=4, ep=8, etp=1)
)
"""Qwen 3 235B-A22B pretraining, 256 x H100 80GB: 63 GB each, TP4 PP8 EP8."""
qwen3_30b_a3b_fp8_pretrain_config = pretrain_recipe(QWEN3_30B_A3B, _PRETRAIN_30B, FP8, layout(tp=4, ep=8, etp=1))
"""Qwen 3 30B-A3B pretraining in FP8, 16 x H100 80GB: 62 GB each, TP4 EP8."""
qwen3_30b_a3b_mxfp8_pretrain_config = pretrain_recipe(QWEN3_30B_A3B, _PRETRAIN_30B, MXFP8, layout(ep=4))
"""Qwen 3 30B-A3B pretraining in MXFP8, 8 x B200 180GB: 143 GB each, EP4."""
qwen3_235b_a22b_fp8_pretrain_config = pretrain_recipe(
    QWEN3_235B_A22B, _PRETRAIN_235B, FP8, layout(tp=4, pp=8, vp=4, ep=8, etp=1)
)
"""Qwen 3 235B-A22B pretraining in FP8, 256 x H100 80GB: 71 GB each, TP4 PP8 EP8."""
qwen3_235b_a22b_mxfp8_pretrain_config = pretrain_recipe(
    QWEN3_235B_A22B, _PRETRAIN_235B, MXFP8, layout(tp=2, pp=4, vp=8, ep=8, etp=1)
)
"""Qwen 3 235B-A22B pretraining in MXFP8, 128 x B200 180GB: 139 GB each, TP2 PP4 EP8."""

qwen3_30b_a3b_finetune_config = finetune_recipe(QWEN3_30B_A3B, layout(tp=2, ep=8, etp=1))
"""Qwen 3 30B-A3B full fine-tuning, 16 x H100 80GB: 64 GB each, TP2 EP8."""
qwen3_235b_a22b_finetune_config = finetune_recipe(
    QWEN3_235B_A22B, layout(tp=8, pp=8, vp=4, ep=8, etp=1), embedding_and_loss_are_layers=True
)
"""Qwen 3 235B-A22B full fine-tuning, 128 x H100 80GB: 62 GB each, TP8 PP8 EP8."""
