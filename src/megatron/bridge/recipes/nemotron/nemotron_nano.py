# SPDX-License-Identifier: Apache-2.0
"""Nemotron Nano: version 2, which is dense, and version 3, with experts (E) instead of feed-forward layers.

The learning rate of 12B v2, from which 9B was pruned, is from "NVIDIA Nemotron Nano 2" (2025); the other one is
our own.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import PretrainOptions, layout

NEMOTRON_3_NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
_PRETRAIN: PretrainOptions = {"seq_length": 8192, "global_batch_size": 768, "lr": 4.5e-4, "min_lr": 4.5e-6}

nemotron_nano_9b_v2_pretrain_config = pretrain_recipe("nvidia/NVIDIA-Nemotron-Nano-9B-v2", _PRETRAIN, layout(tp=2))
"""Nemotron Nano 9B v2 pretraining, 16 x H100 80GB: 59 GB each, TP2."""
nemotron_nano_12b_v2_pretrain_config = pretrain_recipe("nvidia/NVIDIA-Nemotron-Nano-12B-v2", _PRETRAIN, layout(tp=4))
"""Nemotron Nano 12B v2 pretraining, 16 x H100 80GB: 43 GB each, TP4."""
nemotron_3_nano_pretrain_config = pretrain_recipe(
    NEMOTRON_3_NANO, layout(tp=2, ep=8, etp=1), seq_length=8192, global_batch_size=768, lr=3e-4
)
"""Nemotron 3 Nano 30B-A3B pretraining, 32 x H100 80GB: 62 GB each, TP2 EP8."""

nemotron_nano_9b_v2_finetune_config = finetune_recipe("nvidia/NVIDIA-Nemotron-Nano-9B-v2", layout(tp=2))
"""Nemotron Nano 9B v2 full fine-tuning, 8 x H100 80GB: 53 GB each, TP2."""
nemotron_nano_12b_v2_finetune_config = finetune_recipe("nvidia/NVIDIA-Nemotron-Nano-12B-v2", layout(tp=4))
"""Nemotron Nano 12B v2 full fine-tuning, 8 x H100 80GB: 45 GB each, TP4."""
nemotron_3_nano_finetune_config = finetune_recipe(NEMOTRON_3_NANO, layout(tp=2, ep=8, etp=1))
"""Nemotron 3 Nano 30B-A3B full fine-tuning, 16 x H100 80GB: 63 GB each, TP2 EP8."""
