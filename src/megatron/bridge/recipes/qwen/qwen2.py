# SPDX-License-Identifier: Apache-2.0
"""Qwen 2. Learning rates are our own: none are published."""

from typing import Any

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.qwen.qwen15 import MOE, QWEN15
from megatron.bridge.recipes.sizes import Generation

QWEN2 = Generation({**QWEN15.common, "max_position_embeddings": 131072})
QWEN2_MOE: dict[str, Any] = {
    **MOE,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480,
}
QWEN2_500M = QWEN2.size("Qwen/Qwen2-0.5B", 896, 4864, 24, 14, 2, tie_word_embeddings=True)
QWEN2_1P5B = QWEN2.size("Qwen/Qwen2-1.5B", 1536, 8960, 28, 12, 2, tie_word_embeddings=True)
QWEN2_7B = QWEN2.size("Qwen/Qwen2-7B", 3584, 18944, 28, 28, 4, vocab_size=152064)
QWEN2_72B = QWEN2.size("Qwen/Qwen2-72B", 8192, 29568, 80, 64, 8, vocab_size=152064, rms_norm_eps=1e-5)
QWEN2_57B_A14B = QWEN2.size("Qwen/Qwen2-57B-A14B", 3584, 18944, 28, 28, 4, **QWEN2_MOE)

qwen2_500m_pretrain_config = pretrain_recipe(QWEN2_500M, seq_length=4096, micro_batch_size=2, lr=1e-3, min_lr=1e-5)
"""Qwen 2 0.5B pretraining, 8 x H100 80GB: 18 GB each, no model parallelism."""
qwen2_1p5b_pretrain_config = pretrain_recipe(QWEN2_1P5B, seq_length=4096, micro_batch_size=2, lr=5e-4, min_lr=5e-6)
"""Qwen 2 1.5B pretraining, 8 x H100 80GB: 35 GB each, no model parallelism."""
qwen2_7b_pretrain_config = pretrain_recipe(QWEN2_7B, layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen 2 7B pretraining, 8 x H100 80GB: 46 GB each, TP2."""
qwen2_72b_pretrain_config = pretrain_recipe(QWEN2_72B, layout(tp=8, pp=2), seq_length=4096, lr=1.5e-4, min_lr=1.5e-6)
"""Qwen 2 72B pretraining, 64 x H100 80GB: 54 GB each, TP8 PP2."""
qwen2_57b_a14b_pretrain_config = pretrain_recipe(
    QWEN2_57B_A14B, layout(tp=4, pp=2, ep=8, etp=1), seq_length=4096, lr=2e-4
)
"""Qwen 2 57B-A14B pretraining, 32 x H100 80GB: 57 GB each, TP4 PP2 EP8."""

qwen2_500m_finetune_config = finetune_recipe(QWEN2_500M, lr=1e-5)
"""Qwen 2 0.5B full fine-tuning, 1 x H100 80GB: 16 GB, no model parallelism."""
qwen2_1p5b_finetune_config = finetune_recipe(QWEN2_1P5B, lr=1e-5)
"""Qwen 2 1.5B full fine-tuning, 1 x H100 80GB: 40 GB, no model parallelism."""
qwen2_7b_finetune_config = finetune_recipe(QWEN2_7B, layout(tp=2))
"""Qwen 2 7B full fine-tuning, 8 x H100 80GB: 46 GB each, TP2."""
qwen2_72b_finetune_config = finetune_recipe(QWEN2_72B, layout(tp=8, pp=2))
"""Qwen 2 72B full fine-tuning, 32 x H100 80GB: 68 GB each, TP8 PP2."""
qwen2_57b_a14b_finetune_config = finetune_recipe(QWEN2_57B_A14B, layout(tp=4, pp=2, ep=8, etp=1))
"""Qwen 2 57B-A14B full fine-tuning, 32 x H100 80GB: 57 GB each, TP4 PP2 EP8."""
