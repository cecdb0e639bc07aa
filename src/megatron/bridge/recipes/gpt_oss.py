# SPDX-License-Identifier: Apache-2.0
"""gpt-oss. Learning rates are our own: none are published.

Transformers does not apply the published coefficient of the load-balancing loss, 0.9 (``output_router_logits`` is
off). It would outweigh the language-model loss, so the recipes use 0.001.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe, qlora_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import size_of

_TRAINING = {"moe_aux_loss_coeff": 0.001}
GPT_OSS_20B = size_of("openai/gpt-oss-20b", _TRAINING)
GPT_OSS_120B = size_of("openai/gpt-oss-120b", _TRAINING)

gpt_oss_20b_pretrain_config = pretrain_recipe(
    GPT_OSS_20B,
    layout(tp=2, ep=4, etp=1),
    what="gpt-oss 20B pretraining",
    gpus=16,
    memory_gb=65,
    seq_length=4096,
    lr=3e-4,
)
gpt_oss_120b_pretrain_config = pretrain_recipe(
    GPT_OSS_120B,
    layout(tp=2, pp=4, vp=3, ep=8, etp=1),
    what="gpt-oss 120B pretraining",
    gpus=64,
    memory_gb=72,
    seq_length=4096,
    lr=2e-4,
)

gpt_oss_20b_finetune_config = finetune_recipe(
    GPT_OSS_20B,
    layout(tp=2, ep=8, etp=1),
    what="gpt-oss 20B full fine-tuning",
    gpus=8,
    memory_gb=66,
)
gpt_oss_20b_qlora_config = qlora_recipe(
    GPT_OSS_20B, what="gpt-oss 20B QLoRA on the published MXFP4 experts", memory_gb=48
)
gpt_oss_120b_finetune_config = finetune_recipe(
    GPT_OSS_120B,
    layout(tp=2, pp=4, vp=3, ep=8, etp=1),
    what="gpt-oss 120B full fine-tuning",
    gpus=64,
    memory_gb=72,
)
