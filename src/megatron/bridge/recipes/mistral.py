# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Mistral family."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

# Ministral 3: pretraining of the text models, fine-tuning with images.
#
# The text models' config is ``text_config`` of the published config. Learning rates of pretraining are our own, and
# rates of fine-tuning are Megatron Bridge's. The memory of fine-tuning is for samples that consist of images, which are
# distributed evenly over tensor-parallel ranks.

MINISTRAL3_8B = "mistralai/Ministral-3-8B-Base-2512"
MINISTRAL3_14B = "mistralai/Ministral-3-14B-Base-2512"
MINISTRAL3_8B_VL = "mistralai/Ministral-3-8B-Instruct-2512"
MINISTRAL3_14B_VL = "mistralai/Ministral-3-14B-Instruct-2512"

ministral3_3b_pretrain_config = pretrain_recipe(
    "mistralai/Ministral-3-3B-Base-2512",
    what="Ministral 3 3B (text) pretraining",
    gpus=8,
    memory_gb=54,
    seq_length=8192,
    lr=3e-4,
)
ministral3_8b_pretrain_config = pretrain_recipe(
    MINISTRAL3_8B,
    layout(tp=2),
    what="Ministral 3 8B (text) pretraining",
    gpus=8,
    memory_gb=62,
    seq_length=8192,
    lr=3e-4,
)
ministral3_14b_pretrain_config = pretrain_recipe(
    MINISTRAL3_14B,
    layout(tp=4),
    what="Ministral 3 14B (text) pretraining",
    gpus=16,
    memory_gb=46,
    seq_length=8192,
    lr=3e-4,
)

ministral3_3b_finetune_config = finetune_recipe(
    "mistralai/Ministral-3-3B-Instruct-2512",
    what="Ministral 3 3B full fine-tuning",
    gpus=8,
    memory_gb=67,
)
ministral3_8b_finetune_config = finetune_recipe(
    MINISTRAL3_8B_VL, layout(tp=2), what="Ministral 3 8B full fine-tuning", gpus=8, memory_gb=66
)
ministral3_14b_finetune_config = finetune_recipe(
    MINISTRAL3_14B_VL, layout(tp=4), what="Ministral 3 14B full fine-tuning", gpus=8, memory_gb=60
)

# Mistral 7B, NeMo and Small, and Ministral of 2024. Learning rates are our own: none are published.

MINISTRAL_8B = "mistralai/Ministral-8B-Instruct-2410"
MISTRAL_NEMO_12B = "mistralai/Mistral-Nemo-Base-2407"
MISTRAL_SMALL_24B = "mistralai/Mistral-Small-24B-Base-2501"

mistral_7b_pretrain_config = pretrain_recipe(
    "mistralai/Mistral-7B-v0.3",
    layout(tp=2),
    what="Mistral 7B pretraining",
    gpus=8,
    memory_gb=53,
    seq_length=8192,
    lr=3e-4,
)
ministral_8b_pretrain_config = pretrain_recipe(
    MINISTRAL_8B,
    layout(tp=2),
    what="Ministral 8B pretraining",
    gpus=8,
    memory_gb=59,
    seq_length=8192,
    lr=3e-4,
)
mistral_nemo_12b_pretrain_config = pretrain_recipe(
    MISTRAL_NEMO_12B,
    layout(tp=4),
    what="Mistral NeMo 12B pretraining",
    gpus=16,
    memory_gb=42,
    seq_length=8192,
    lr=3e-4,
)
mistral_small_24b_pretrain_config = pretrain_recipe(
    MISTRAL_SMALL_24B,
    layout(tp=4),
    what="Mistral Small 24B pretraining",
    gpus=32,
    memory_gb=68,
    seq_length=8192,
    lr=2e-4,
)

mistral_7b_finetune_config = finetune_recipe(
    "mistralai/Mistral-7B-v0.3",
    layout(tp=2),
    what="Mistral 7B full fine-tuning",
    gpus=8,
    memory_gb=43,
)
ministral_8b_finetune_config = finetune_recipe(
    MINISTRAL_8B, layout(tp=2), what="Ministral 8B full fine-tuning", gpus=8, memory_gb=48
)
mistral_nemo_12b_finetune_config = finetune_recipe(
    MISTRAL_NEMO_12B, layout(tp=2), what="Mistral NeMo 12B full fine-tuning", gpus=8, memory_gb=70
)
mistral_small_24b_finetune_config = finetune_recipe(
    MISTRAL_SMALL_24B,
    layout(tp=4),
    what="Mistral Small 24B full fine-tuning",
    gpus=16,
    memory_gb=65,
)

# Mixtral. Learning rates are our own: none are published.

mixtral_8x7b_pretrain_config = pretrain_recipe(
    "mistralai/Mixtral-8x7B-v0.1",
    layout(tp=2, pp=4, vp=4, ep=4, etp=1),
    what="Mixtral 8x7B pretraining",
    gpus=32,
    memory_gb=57,
    seq_length=4096,
    lr=3e-4,
)
mixtral_8x22b_pretrain_config = pretrain_recipe(
    "mistralai/Mixtral-8x22B-v0.1",
    layout(tp=4, pp=4, vp=7, ep=8, etp=1),
    what="Mixtral 8x22B pretraining",
    gpus=128,
    memory_gb=62,
    seq_length=4096,
    lr=2e-4,
)

mixtral_8x7b_finetune_config = finetune_recipe(
    "mistralai/Mixtral-8x7B-v0.1",
    layout(tp=2, pp=4, vp=4, ep=4, etp=1),
    what="Mixtral 8x7B full fine-tuning",
    gpus=32,
    memory_gb=57,
)
mixtral_8x22b_finetune_config = finetune_recipe(
    "mistralai/Mixtral-8x22B-v0.1",
    layout(tp=8, pp=4, vp=7, ep=8, etp=1),
    what="Mixtral 8x22B full fine-tuning",
    gpus=64,
    memory_gb=64,
)
