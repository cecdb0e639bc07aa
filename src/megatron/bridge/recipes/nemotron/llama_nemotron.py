# SPDX-License-Identifier: Apache-2.0
"""Llama-Nemotron: Llama 3, pruned by a search, so that its layers differ. Learning rates are our own."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

# fmt: off
# fmt: on

LLAMA_NEMOTRON_8B = "nvidia/Llama-3.1-Nemotron-Nano-8B-v1"
LLAMA_NEMOTRON_49B = "nvidia/Llama-3_3-Nemotron-Super-49B-v1"
LLAMA_NEMOTRON_253B = "nvidia/Llama-3_1-Nemotron-Ultra-253B-v1"

llama_nemotron_8b_pretrain_config = pretrain_recipe(LLAMA_NEMOTRON_8B, layout(tp=2), seq_length=8192, lr=3e-4)
"""Llama-Nemotron 8B pretraining, 8 x H100 80GB: 58 GB each, TP2."""
llama_nemotron_49b_pretrain_config = pretrain_recipe(LLAMA_NEMOTRON_49B, layout(tp=8), seq_length=8192, lr=2e-4)
"""Llama-Nemotron 49B pretraining, 64 x H100 80GB: 65 GB each, TP8."""
llama_nemotron_253b_pretrain_config = pretrain_recipe(
    LLAMA_NEMOTRON_253B, layout(tp=8, pp=6, cp=2), seq_length=8192, global_batch_size=768, lr=8e-5, min_lr=8e-7
)
"""Llama-Nemotron 253B pretraining, 384 x H100 80GB: 64 GB each, TP8 PP6 CP2."""

llama_nemotron_8b_finetune_config = finetune_recipe(LLAMA_NEMOTRON_8B, layout(tp=2))
"""Llama-Nemotron 8B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
llama_nemotron_49b_finetune_config = finetune_recipe(LLAMA_NEMOTRON_49B, layout(tp=8))
"""Llama-Nemotron 49B full fine-tuning, 32 x H100 80GB: 65 GB each, TP8."""
llama_nemotron_253b_finetune_config = finetune_recipe(LLAMA_NEMOTRON_253B, layout(tp=8, pp=9), global_batch_size=192)
"""Llama-Nemotron 253B full fine-tuning, 144 x H100 80GB: 71 GB each, TP8 PP9."""
