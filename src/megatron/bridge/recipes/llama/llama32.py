# SPDX-License-Identifier: Apache-2.0
"""Llama 3.2 and Llama 3.3, a further-trained 3.1 70B. The learning rates of Llama 3.2 are our own."""

from megatron.bridge.recipes.builders import dpo_recipe, finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

llama32_1b_pretrain_config = pretrain_recipe("meta-llama/Llama-3.2-1B", seq_length=8192, lr=5e-4, min_lr=5e-6)
"""Llama 3.2 1B pretraining, 8 x H100 80GB: 25 GB each, no model parallelism."""
llama32_3b_pretrain_config = pretrain_recipe("meta-llama/Llama-3.2-3B", seq_length=8192, lr=3e-4)
"""Llama 3.2 3B pretraining, 8 x H100 80GB: 51 GB each, no model parallelism."""
llama33_70b_pretrain_config = pretrain_recipe(
    "meta-llama/Llama-3.3-70B-Instruct", layout(tp=8, pp=2), seq_length=8192, lr=1.5e-4, min_lr=1.5e-6
)
"""Llama 3.3 70B pretraining, 64 x H100 80GB: 65 GB each, TP8 PP2."""

llama32_1b_finetune_config = finetune_recipe("meta-llama/Llama-3.2-1B", lr=1e-5)
"""Llama 3.2 1B full fine-tuning, 1 x H100 80GB: 30 GB, no model parallelism."""
llama32_1b_dpo_config = dpo_recipe("meta-llama/Llama-3.2-1B", lr=1e-6)
"""Llama 3.2 1B DPO, 1 x H100 80GB: 36 GB, no model parallelism."""
llama32_3b_finetune_config = finetune_recipe("meta-llama/Llama-3.2-3B", lr=1e-5)
"""Llama 3.2 3B full fine-tuning, 8 x H100 80GB: 38 GB each, no model parallelism."""
llama33_70b_finetune_config = finetune_recipe("meta-llama/Llama-3.3-70B-Instruct", layout(tp=8, pp=2))
"""Llama 3.3 70B full fine-tuning, 32 x H100 80GB: 66 GB each, TP8 PP2."""
