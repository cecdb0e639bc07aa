# SPDX-License-Identifier: Apache-2.0
"""OLMo 2, Olmo 3, OLMoE and FlexOlmo.

Learning rates and batch sizes of OLMo 2 and Olmo 3 are from their published training configs, OLMoE's are from
"OLMoE: Open Mixture-of-Experts Language Models" (2024), and FlexOlmo's are our own. Nodes of 8 GPUs cannot share the 7
experts of FlexOlmo evenly, so each expert is sharded over 8 GPUs.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.options import PretrainOptions, layout

OLMO3_7B = "allenai/Olmo-3-1025-7B"
_PRETRAIN: PretrainOptions = {"seq_length": 4096, "global_batch_size": 1024}

olmoe_7b_pretrain_config = pretrain_recipe(
    "allenai/OLMoE-1B-7B-0924", _PRETRAIN, lr=4e-4, min_lr=4e-5
)
olmo2_7b_pretrain_config = pretrain_recipe(
    "allenai/OLMo-2-1124-7B", _PRETRAIN, layout(tp=2), lr=3e-4, min_lr=3e-5
)
olmo3_7b_pretrain_config = pretrain_recipe(
    OLMO3_7B, layout(tp=2), seq_length=8192, lr=3e-4, min_lr=3e-5
)
flexolmo_33b_pretrain_config = pretrain_recipe(
    "allenai/FlexOlmo-7x7B-1T", layout(tp=8), seq_length=4096, lr=2e-4
)

olmoe_7b_finetune_config = finetune_recipe("allenai/OLMoE-1B-7B-0924")
olmo2_7b_finetune_config = finetune_recipe("allenai/OLMo-2-1124-7B", layout(tp=2))
olmo3_7b_finetune_config = finetune_recipe(OLMO3_7B, layout(tp=2))
flexolmo_33b_finetune_config = finetune_recipe("allenai/FlexOlmo-7x7B-1T", layout(tp=8))

name_functions(__name__)
