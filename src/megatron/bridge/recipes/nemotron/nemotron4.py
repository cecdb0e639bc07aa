# SPDX-License-Identifier: Apache-2.0
"""Nemotron-4, and the Minitrons that were pruned from it.

Learning rate and batch size of 15B are from "Nemotron-4 15B Technical Report" (2024), the batch size of 340B is
from "Nemotron-4 340B Technical Report" (2024), and the other rates are our own. 15B is not on the hub: its sizes
are from the report, its tokenizer is that of the Minitron that was pruned from it.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import size_of

NEMOTRON4_15B = size_of("nvidia/Minitron-8B-Base", hidden_size=6144, intermediate_size=24576)
NEMOTRON4_340B = "nvidia/Nemotron-4-340B-Base"

nemotron4_15b_pretrain_config = pretrain_recipe(
    NEMOTRON4_15B, layout(tp=2), seq_length=4096, global_batch_size=1152, lr=4.5e-4, min_lr=4.5e-7
)
"""Nemotron-4 15B pretraining, 32 x H100 80GB: 70 GB each, TP2."""
nemotron4_340b_pretrain_config = pretrain_recipe(
    NEMOTRON4_340B, layout(tp=8, pp=12, vp=8), seq_length=4096, global_batch_size=2304, lr=1e-4, min_lr=1e-6
)
"""Nemotron-4 340B pretraining, 768 x H100 80GB: 66 GB each, TP8 PP12."""
minitron_4b_pretrain_config = pretrain_recipe("nvidia/Minitron-4B-Base", seq_length=4096, lr=3e-4)
"""Minitron 4B pretraining, 8 x H100 80GB: 49 GB each, no model parallelism."""
minitron_8b_pretrain_config = pretrain_recipe("nvidia/Minitron-8B-Base", layout(tp=2), seq_length=4096, lr=3e-4)
"""Minitron 8B pretraining, 8 x H100 80GB: 50 GB each, TP2."""

nemotron4_15b_finetune_config = finetune_recipe(NEMOTRON4_15B, layout(tp=4))
"""Nemotron-4 15B full fine-tuning, 16 x H100 80GB: 44 GB each, TP4."""
nemotron4_340b_finetune_config = finetune_recipe(NEMOTRON4_340B, layout(tp=8, pp=8, vp=6, cp=2))
"""Nemotron-4 340B full fine-tuning, 256 x H100 80GB: 71 GB each, TP8 PP8 CP2."""
minitron_4b_finetune_config = finetune_recipe("nvidia/Minitron-4B-Base", lr=1e-5)
"""Minitron 4B full fine-tuning, 8 x H100 80GB: 49 GB each, no model parallelism."""
minitron_8b_finetune_config = finetune_recipe("nvidia/Minitron-8B-Base", layout(tp=2))
"""Minitron 8B full fine-tuning, 8 x H100 80GB: 50 GB each, TP2."""
