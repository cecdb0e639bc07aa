# SPDX-License-Identifier: Apache-2.0
"""Kimi K2. The learning rate is from "Kimi K2: Open Agentic Intelligence" (2025); the optimizer here is Adam.

There are 32 interleaved stages of two layers, except that the first has one layer and the embedding, and the last
has only the loss. The published ``model_type``, ``kimi_k2``, is another name of DeepSeek-V3's.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import size_of

KIMI_K2 = size_of("moonshotai/Kimi-K2-Instruct")

kimi_k2_pretrain_config = pretrain_recipe(
    KIMI_K2,
    layout(tp=8, pp=16, vp=2, ep=16, etp=1),
    seq_length=4096,
    global_batch_size=4096,
    lr=2e-4,
    min_lr=2e-5,
    pipeline_layout="Et|(tt|)*30L",
)
"""Kimi K2 1T-A32B pretraining, 1024 x H100 80GB: 59 GB each, TP8 PP16 EP16."""

kimi_k2_finetune_config = finetune_recipe(
    KIMI_K2, layout(tp=8, pp=16, vp=2, ep=16, etp=1), pipeline_layout="Et|(tt|)*30L"
)
"""Kimi K2 1T-A32B full fine-tuning, 512 x H100 80GB: 72 GB each, TP8 PP16 EP16."""
