# SPDX-License-Identifier: Apache-2.0
"""Recipes of the DeepSeek family."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import (
    FP8_BLOCKWISE,
    MXFP8,
    LayoutOptions,
    PretrainOptions,
    layout,
)

# DeepSeek-V2. Learning rates, and the batch size of V2-Lite, are from "DeepSeek-V2" (2024).

DEEPSEEK_V2_LITE = "deepseek-ai/DeepSeek-V2-Lite"
_V2_PRETRAIN: PretrainOptions = {"seq_length": 4096, "global_batch_size": 4608}

deepseek_v2_lite_pretrain_config = pretrain_recipe(
    DEEPSEEK_V2_LITE,
    _V2_PRETRAIN,
    layout(ep=4),
    what="DeepSeek-V2-Lite 16B pretraining",
    gpus=8,
    memory_gb=71,
    lr=4.2e-4,
    min_lr=4.2e-5,
)
deepseek_v2_pretrain_config = pretrain_recipe(
    "deepseek-ai/DeepSeek-V2",
    _V2_PRETRAIN,
    layout(tp=4, pp=16, ep=8, etp=1),
    what="DeepSeek-V2 236B pretraining",
    gpus=128,
    memory_gb=63,
    pipeline_layout="Etttt|(tttt|)*14L",
    lr=2.4e-4,
    min_lr=2.4e-5,
)

deepseek_v2_lite_finetune_config = finetune_recipe(
    DEEPSEEK_V2_LITE,
    layout(ep=4),
    what="DeepSeek-V2-Lite 16B full fine-tuning",
    gpus=8,
    memory_gb=71,
)
deepseek_v2_finetune_config = finetune_recipe(
    "deepseek-ai/DeepSeek-V2",
    layout(tp=8, pp=4, vp=5, ep=16, etp=1),
    what="DeepSeek-V2 236B full fine-tuning",
    gpus=128,
    memory_gb=60,
)

# DeepSeek-V3 and V3.2, with learning rate and sequence length of "DeepSeek-V3 Technical Report" (2024).
#
# There are 32 interleaved stages for 61 layers: the first has one layer and the embedding, the last has one layer
# and the layer for multi-token prediction, the stage before it has one layer, and all others have two.

DEEPSEEK_V3 = "deepseek-ai/DeepSeek-V3"
_STAGES: LayoutOptions = {"pipeline_layout": "Et|(tt|)*29t|tmL"}
_RECOMPUTE: LayoutOptions = {"recompute": ["mla_up_proj", "layernorm", "moe_act"]}
_RECOMPUTE_LESS: LayoutOptions = {"recompute": ["layernorm", "moe_act"]}
_V32: LayoutOptions = layout(tp=8, pp=16, vp=2, ep=16, etp=1)
_V3_PRETRAIN: PretrainOptions = {
    "seq_length": 4096,
    "global_batch_size": 4096,
    "lr": 2.2e-4,
    "min_lr": 2.2e-5,
}

deepseek_v3_pretrain_config = pretrain_recipe(
    DEEPSEEK_V3,
    _STAGES,
    _RECOMPUTE,
    _V3_PRETRAIN,
    layout(tp=4, pp=16, vp=2, ep=16, etp=1),
    what="DeepSeek-V3 671B pretraining",
    gpus=1024,
    memory_gb=61,
)
deepseek_v3_pretrain_config_32nodes = pretrain_recipe(
    DEEPSEEK_V3,
    _STAGES,
    _RECOMPUTE,
    _V3_PRETRAIN,
    layout(tp=8, pp=8, vp=4, ep=32, etp=1),
    what="DeepSeek-V3 671B pretraining on 32 nodes",
    gpus=256,
    memory_gb=67,
)
deepseek_v3_fp8_blockwise_pretrain_config = pretrain_recipe(
    DEEPSEEK_V3,
    _STAGES,
    _RECOMPUTE_LESS,
    _V3_PRETRAIN,
    FP8_BLOCKWISE,
    layout(tp=4, pp=16, vp=2, ep=32, etp=1),
    what="DeepSeek-V3 671B pretraining in blockwise FP8",
    gpus=1024,
    memory_gb=59,
)
deepseek_v3_mxfp8_pretrain_config = pretrain_recipe(
    DEEPSEEK_V3,
    _STAGES,
    _V3_PRETRAIN,
    MXFP8,
    layout(tp=4, pp=16, vp=2, ep=8, etp=1),
    what="DeepSeek-V3 671B pretraining in MXFP8",
    gpus=256,
    gpu_kind="B200 180GB",
    memory_gb=123,
)
deepseek_v32_pretrain_config = pretrain_recipe(
    "deepseek-ai/DeepSeek-V3.2-Exp",
    _STAGES,
    _RECOMPUTE,
    _V3_PRETRAIN,
    _V32,
    what="DeepSeek-V3.2 671B pretraining",
    gpus=512,
    memory_gb=59,
)

deepseek_v3_finetune_config = finetune_recipe(
    DEEPSEEK_V3,
    _STAGES,
    _RECOMPUTE,
    layout(tp=8, pp=8, vp=4, ep=32, etp=1),
    what="DeepSeek-V3 671B full fine-tuning",
    gpus=256,
    memory_gb=67,
)
deepseek_v32_finetune_config = finetune_recipe(
    "deepseek-ai/DeepSeek-V3.2-Exp",
    _STAGES,
    _RECOMPUTE_LESS,
    _V32,
    what="DeepSeek-V3.2 671B full fine-tuning",
    gpus=512,
    memory_gb=63,
)
