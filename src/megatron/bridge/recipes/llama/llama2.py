# SPDX-License-Identifier: Apache-2.0
"""Llama 2. Learning rates and batch size are from "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023)."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

LLAMA2_7B = "meta-llama/Llama-2-7b-hf"

llama2_7b_pretrain_config = pretrain_recipe(LLAMA2_7B, seq_length=4096, global_batch_size=1024, lr=3e-4, min_lr=3e-5)
"""Llama 2 7B pretraining, 8 x H100 80GB: 71 GB each, no model parallelism."""
llama2_13b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-2-13b-hf", layout(tp=2), seq_length=4096, global_batch_size=1024, lr=3e-4, min_lr=3e-5
)
"""Llama 2 13B pretraining, 16 x H100 80GB: 65 GB each, TP2."""
llama2_70b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-2-70b-hf", layout(tp=8, pp=2), seq_length=4096, global_batch_size=1024, lr=1.5e-4, min_lr=1.5e-5
)
"""Llama 2 70B pretraining, 64 x H100 80GB: 52 GB each, TP8 PP2."""

llama2_7b_finetune_config = finetune_recipe(LLAMA2_7B)
"""Llama 2 7B full fine-tuning, 8 x H100 80GB: 71 GB each, no model parallelism."""
llama2_13b_finetune_config = finetune_recipe("meta-llama/Llama-2-13b-hf", layout(tp=4))
"""Llama 2 13B full fine-tuning, 8 x H100 80GB: 47 GB each, TP4."""
llama2_70b_finetune_config = finetune_recipe("meta-llama/Llama-2-70b-hf", layout(tp=8, pp=2))
"""Llama 2 70B full fine-tuning, 32 x H100 80GB: 65 GB each, TP8 PP2."""
