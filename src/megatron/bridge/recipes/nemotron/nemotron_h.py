# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H: Mamba-2 layers (M) and feed-forward layers (-) with a few attention layers (*).

Learning rates and batch sizes of 8B and 56B, from which 4B and 47B were pruned, are from "Nemotron-H" (2025).
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import PretrainOptions, layout

NEMOTRONH_8B = "nvidia/Nemotron-H-8B-Base-8K"
NEMOTRONH_47B = "nvidia/Nemotron-H-47B-Base-8K"
NEMOTRONH_56B = "nvidia/Nemotron-H-56B-Base-8K"
_PRETRAIN: PretrainOptions = {"seq_length": 8192, "global_batch_size": 768}

nemotronh_4b_pretrain_config = pretrain_recipe("nvidia/Nemotron-H-4B-Base-8K", _PRETRAIN, lr=8e-4, min_lr=8e-6)
"""Nemotron-H 4B pretraining, 8 x H100 80GB: 69 GB each, no model parallelism."""
nemotronh_8b_pretrain_config = pretrain_recipe(NEMOTRONH_8B, _PRETRAIN, layout(tp=2), lr=8e-4, min_lr=8e-6)
"""Nemotron-H 8B pretraining, 16 x H100 80GB: 55 GB each, TP2."""
nemotronh_47b_pretrain_config = pretrain_recipe(NEMOTRONH_47B, _PRETRAIN, layout(tp=8), lr=4e-4, min_lr=4e-6)
"""Nemotron-H 47B pretraining, 64 x H100 80GB: 62 GB each, TP8."""
nemotronh_56b_pretrain_config = pretrain_recipe(NEMOTRONH_56B, _PRETRAIN, layout(tp=8, pp=2), lr=4e-4, min_lr=4e-6)
"""Nemotron-H 56B pretraining, 64 x H100 80GB: 54 GB each, TP8 PP2."""

nemotronh_4b_finetune_config = finetune_recipe("nvidia/Nemotron-H-4B-Base-8K", lr=1e-5)
"""Nemotron-H 4B full fine-tuning, 8 x H100 80GB: 52 GB each, no model parallelism."""
nemotronh_8b_finetune_config = finetune_recipe(NEMOTRONH_8B, layout(tp=2))
"""Nemotron-H 8B full fine-tuning, 8 x H100 80GB: 49 GB each, TP2."""
nemotronh_47b_finetune_config = finetune_recipe(NEMOTRONH_47B, layout(tp=8))
"""Nemotron-H 47B full fine-tuning, 32 x H100 80GB: 62 GB each, TP8."""
nemotronh_56b_finetune_config = finetune_recipe(NEMOTRONH_56B, layout(tp=8, pp=2))
"""Nemotron-H 56B full fine-tuning, 32 x H100 80GB: 54 GB each, TP8 PP2."""
