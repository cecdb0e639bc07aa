# SPDX-License-Identifier: Apache-2.0
"""Gemma 2. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.gemma.gemma import GEMMA
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import Generation

GEMMA2 = Generation(
    {
        **GEMMA.common,
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    }
)
GEMMA2_2B = GEMMA2.size("google/gemma-2-2b", 2304, 9216, 26, 8, 4)
GEMMA2_9B = GEMMA2.size("google/gemma-2-9b", 3584, 14336, 42, 16, 8)
GEMMA2_27B = GEMMA2.size("google/gemma-2-27b", 4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144)

gemma2_2b_pretrain_config = pretrain_recipe(GEMMA2_2B, seq_length=8192, lr=3e-4)
"""Gemma 2 2B pretraining, 8 x H100 80GB: 62 GB each, no model parallelism."""
gemma2_9b_pretrain_config = pretrain_recipe(GEMMA2_9B, layout(tp=4), seq_length=8192, lr=3e-4)
"""Gemma 2 9B pretraining, 16 x H100 80GB: 45 GB each, TP4."""
gemma2_27b_pretrain_config = pretrain_recipe(GEMMA2_27B, layout(tp=8), seq_length=8192, lr=2e-4)
"""Gemma 2 27B pretraining, 32 x H100 80GB: 56 GB each, TP8."""

gemma2_2b_finetune_config = finetune_recipe(GEMMA2_2B, lr=1e-5)
"""Gemma 2 2B full fine-tuning, 8 x H100 80GB: 41 GB each, no model parallelism."""
gemma2_9b_finetune_config = finetune_recipe(GEMMA2_9B, layout(tp=2))
"""Gemma 2 9B full fine-tuning, 8 x H100 80GB: 66 GB each, TP2."""
gemma2_27b_finetune_config = finetune_recipe(GEMMA2_27B, layout(tp=8))
"""Gemma 2 27B full fine-tuning, 16 x H100 80GB: 54 GB each, TP8."""
