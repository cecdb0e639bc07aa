# SPDX-License-Identifier: Apache-2.0
"""Models with mixers or short convolutions in the place of attention, or beside it. Learning rates are our own."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import PretrainOptions, layout

_PRETRAIN: PretrainOptions = {"seq_length": 4096, "lr": 3e-4}

bamba_9b_pretrain_config = pretrain_recipe("ibm-fms/Bamba-9B", _PRETRAIN, layout(tp=2))
"""Bamba 9B pretraining, 16 x H100 80GB: 52 GB each, TP2."""
codestral_mamba_7b_pretrain_config = pretrain_recipe("mistralai/Mamba-Codestral-7B-v0.1", _PRETRAIN, layout(tp=2))
"""Codestral Mamba 7B pretraining, 16 x H100 80GB: 43 GB each, TP2."""
falcon_h1_500m_pretrain_config = pretrain_recipe("tiiuae/Falcon-H1-0.5B-Base", _PRETRAIN, micro_batch_size=4)
"""Falcon-H1 0.5B pretraining, 8 x H100 80GB: 30 GB each, no model parallelism."""
granite4_h_tiny_pretrain_config = pretrain_recipe("ibm-granite/granite-4.0-h-tiny", _PRETRAIN)
"""Granite 4 H-Tiny 7B-A1B pretraining, 8 x H100 80GB: 69 GB each, no model parallelism."""
jamba_52b_pretrain_config = pretrain_recipe("ai21labs/Jamba-v0.1", _PRETRAIN, layout(tp=4, ep=8, etp=1))
"""Jamba 52B-A12B pretraining, 32 x H100 80GB: 72 GB each, TP4 EP8."""
lfm2_1p2b_pretrain_config = pretrain_recipe("LiquidAI/LFM2-1.2B", _PRETRAIN)
"""LFM2 1.2B pretraining, 8 x H100 80GB: 16 GB each, no model parallelism."""
lfm2_8b_a1b_pretrain_config = pretrain_recipe("LiquidAI/LFM2-8B-A1B", _PRETRAIN, layout(ep=2))
"""LFM2 8B-A1B pretraining, 8 x H100 80GB: 51 GB each, EP2."""

bamba_9b_finetune_config = finetune_recipe("ibm-fms/Bamba-9B", layout(tp=2))
"""Bamba 9B full fine-tuning, 8 x H100 80GB: 59 GB each, TP2."""
codestral_mamba_7b_finetune_config = finetune_recipe("mistralai/Mamba-Codestral-7B-v0.1", layout(tp=2))
"""Codestral Mamba 7B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
falcon_h1_500m_finetune_config = finetune_recipe("tiiuae/Falcon-H1-0.5B-Base", lr=3e-5)
"""Falcon-H1 0.5B full fine-tuning, 1 x H100 80GB: 16 GB, no model parallelism."""
granite4_h_tiny_finetune_config = finetune_recipe("ibm-granite/granite-4.0-h-tiny", lr=1e-5)
"""Granite 4 H-Tiny 7B-A1B full fine-tuning, 8 x H100 80GB: 69 GB each, no model parallelism."""
jamba_52b_finetune_config = finetune_recipe("ai21labs/Jamba-v0.1", layout(tp=4, ep=8, etp=1))
"""Jamba 52B-A12B full fine-tuning, 32 x H100 80GB: 72 GB each, TP4 EP8."""
lfm2_1p2b_finetune_config = finetune_recipe("LiquidAI/LFM2-1.2B", lr=1e-5)
"""LFM2 1.2B full fine-tuning, 8 x H100 80GB: 16 GB each, no model parallelism."""
lfm2_8b_a1b_finetune_config = finetune_recipe("LiquidAI/LFM2-8B-A1B", layout(ep=2))
"""LFM2 8B-A1B full fine-tuning, 8 x H100 80GB: 51 GB each, EP2."""
