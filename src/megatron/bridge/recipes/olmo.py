# SPDX-License-Identifier: Apache-2.0
"""OLMo 2, Olmo 3, OLMoE and FlexOlmo.

Learning rates and batch sizes of OLMo 2 and Olmo 3 are from their published training configs, OLMoE's are from
"OLMoE: Open Mixture-of-Experts Language Models" (2024), and FlexOlmo's are our own. Nodes of 8 GPUs cannot share the 7
experts of FlexOlmo evenly, so each expert is sharded over 8 GPUs.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import PretrainOptions, layout

OLMO3_7B = "allenai/Olmo-3-1025-7B"
_PRETRAIN: PretrainOptions = {"seq_length": 4096, "global_batch_size": 1024}

olmoe_7b_pretrain_config = pretrain_recipe(
    "allenai/OLMoE-1B-7B-0924",
    _PRETRAIN,
    what="OLMoE 7B pretraining",
    gpus=8,
    memory_gb=62,
    lr=4e-4,
    min_lr=4e-5,
)
olmo2_7b_pretrain_config = pretrain_recipe(
    "allenai/OLMo-2-1124-7B",
    _PRETRAIN,
    layout(tp=2),
    what="OLMo 2 7B pretraining",
    gpus=16,
    memory_gb=38,
    lr=3e-4,
    min_lr=3e-5,
)
olmo3_7b_pretrain_config = pretrain_recipe(
    OLMO3_7B,
    layout(tp=2),
    what="Olmo 3 7B pretraining",
    gpus=16,
    memory_gb=50,
    seq_length=8192,
    lr=3e-4,
    min_lr=3e-5,
)
flexolmo_33b_pretrain_config = pretrain_recipe(
    "allenai/FlexOlmo-7x7B-1T",
    layout(tp=2, pp=4),
    what="FlexOlmo 33B pretraining",
    gpus=32,
    memory_gb=64,
    recompute=["layernorm", "moe_act"],
    seq_length=4096,
    lr=2e-4,
)

olmoe_7b_finetune_config = finetune_recipe(
    "allenai/OLMoE-1B-7B-0924", what="OLMoE 7B full fine-tuning", gpus=8, memory_gb=62
)
olmo2_7b_finetune_config = finetune_recipe(
    "allenai/OLMo-2-1124-7B", layout(tp=2), what="OLMo 2 7B full fine-tuning", gpus=8, memory_gb=44
)
olmo3_7b_finetune_config = finetune_recipe(
    OLMO3_7B, layout(tp=2), what="Olmo 3 7B full fine-tuning", gpus=8, memory_gb=44
)
flexolmo_33b_finetune_config = finetune_recipe(
    "allenai/FlexOlmo-7x7B-1T",
    layout(tp=8),
    what="FlexOlmo 33B full fine-tuning",
    gpus=16,
    memory_gb=63,
)
