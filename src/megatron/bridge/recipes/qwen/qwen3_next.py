# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and the text model of Qwen3.5: gated delta nets and attention. Learning rates are our own."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

QWEN3_NEXT_80B_A3B = "Qwen/Qwen3-Next-80B-A3B-Instruct"
QWEN35_35B_A3B = "Qwen/Qwen3.5-35B-A3B"

qwen3_next_80b_a3b_pretrain_config = pretrain_recipe(
    QWEN3_NEXT_80B_A3B, layout(tp=2, pp=2, ep=8, etp=1), seq_length=4096, global_batch_size=1024, lr=3e-4
)
"""Qwen 3 Next 80B-A3B pretraining, 64 x H100 80GB: 67 GB each, TP2 PP2 EP8."""
qwen35_9b_pretrain_config = pretrain_recipe("Qwen/Qwen3.5-9B", layout(tp=2), seq_length=4096, lr=3e-4)
"""Qwen3.5 9B (text) pretraining, 16 x H100 80GB: 50 GB each, TP2."""
qwen35_35b_a3b_pretrain_config = pretrain_recipe(QWEN35_35B_A3B, layout(tp=2, ep=8, etp=1), seq_length=4096, lr=3e-4)
"""Qwen3.5 35B-A3B (text) pretraining, 32 x H100 80GB: 61 GB each, TP2 EP8."""

qwen3_next_80b_a3b_finetune_config = finetune_recipe(QWEN3_NEXT_80B_A3B, layout(tp=2, pp=2, ep=8, etp=1))
"""Qwen 3 Next 80B-A3B full fine-tuning, 64 x H100 80GB: 67 GB each, TP2 PP2 EP8."""
qwen35_9b_finetune_config = finetune_recipe("Qwen/Qwen3.5-9B", layout(tp=2))
"""Qwen3.5 9B (text) full fine-tuning, 8 x H100 80GB: 56 GB each, TP2."""
qwen35_35b_a3b_finetune_config = finetune_recipe(QWEN35_35B_A3B, layout(tp=2, ep=8, etp=1))
"""Qwen3.5 35B-A3B (text) full fine-tuning, 32 x H100 80GB: 61 GB each, TP2 EP8."""
