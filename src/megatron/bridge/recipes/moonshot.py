# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Moonshot family."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

# Kimi K2, and Kimi-Linear with our own learning rate.
#
# K2's rate is from "Kimi K2: Open Agentic Intelligence" (2025); the optimizer here is Adam. K2 has 32 interleaved
# stages of two layers, except that the first has one layer and the embedding, and the last has only the loss. Its
# published ``model_type``, ``kimi_k2``, is another name of DeepSeek-V3's.

KIMI_LINEAR_48B = "moonshotai/Kimi-Linear-48B-A3B-Instruct"

kimi_k2_pretrain_config = pretrain_recipe(
    "moonshotai/Kimi-K2-Instruct",
    layout(tp=8, pp=16, vp=2, ep=16, etp=1),
    what="Kimi K2 1T-A32B pretraining",
    gpus=1024,
    memory_gb=60,
    seq_length=4096,
    global_batch_size=4096,
    lr=2e-4,
    min_lr=2e-5,
    pipeline_layout="Et|(tt|)*30L",
)
kimi_linear_48b_pretrain_config = pretrain_recipe(
    KIMI_LINEAR_48B,
    layout(tp=2, ep=8, etp=1),
    what="Kimi-Linear 48B-A3B pretraining",
    gpus=32,
    memory_gb=70,
    seq_length=4096,
    lr=3e-4,
)

kimi_k2_finetune_config = finetune_recipe(
    "moonshotai/Kimi-K2-Instruct",
    layout(tp=8, pp=16, vp=2, ep=16, etp=1),
    what="Kimi K2 1T-A32B full fine-tuning",
    gpus=512,
    memory_gb=70,
    pipeline_layout="Et|(tt|)*30L",
    recompute=["layernorm", "moe_act"],
)
kimi_linear_48b_finetune_config = finetune_recipe(
    KIMI_LINEAR_48B,
    layout(tp=2, ep=8, etp=1),
    what="Kimi-Linear 48B-A3B full fine-tuning",
    gpus=32,
    memory_gb=70,
)

# Moonlight. The learning rate is from "Muon is Scalable for LLM Training" (2025); the optimizer here is Adam.

MOONLIGHT_16B = "moonshotai/Moonlight-16B-A3B"

moonlight_16b_pretrain_config = pretrain_recipe(
    MOONLIGHT_16B,
    layout(ep=4),
    what="Moonlight 16B-A3B pretraining",
    gpus=16,
    memory_gb=62,
    seq_length=4096,
    lr=4.2e-4,
    min_lr=4.2e-5,
)

moonlight_16b_finetune_config = finetune_recipe(
    MOONLIGHT_16B,
    layout(tp=2, ep=4, etp=1),
    what="Moonlight 16B-A3B full fine-tuning",
    gpus=8,
    memory_gb=60,
)
