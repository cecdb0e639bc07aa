# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B, NeMo and Small. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

MISTRAL_NEMO_12B = "mistralai/Mistral-Nemo-Base-2407"
MISTRAL_SMALL_24B = "mistralai/Mistral-Small-24B-Base-2501"

mistral_7b_pretrain_config = pretrain_recipe("mistralai/Mistral-7B-v0.3", layout(tp=2), seq_length=8192, lr=3e-4)
"""Mistral 7B pretraining, 8 x H100 80GB: 53 GB each, TP2."""
mistral_nemo_12b_pretrain_config = pretrain_recipe(MISTRAL_NEMO_12B, layout(tp=4), seq_length=8192, lr=3e-4)
"""Mistral NeMo 12B pretraining, 16 x H100 80GB: 42 GB each, TP4."""
mistral_small_24b_pretrain_config = pretrain_recipe(MISTRAL_SMALL_24B, layout(tp=4), seq_length=8192, lr=2e-4)
"""Mistral Small 24B pretraining, 32 x H100 80GB: 68 GB each, TP4."""

mistral_7b_finetune_config = finetune_recipe("mistralai/Mistral-7B-v0.3", layout(tp=2))
"""Mistral 7B full fine-tuning, 8 x H100 80GB: 43 GB each, TP2."""
mistral_nemo_12b_finetune_config = finetune_recipe(MISTRAL_NEMO_12B, layout(tp=2))
"""Mistral NeMo 12B full fine-tuning, 8 x H100 80GB: 70 GB each, TP2."""
mistral_small_24b_finetune_config = finetune_recipe(MISTRAL_SMALL_24B, layout(tp=4))
"""Mistral Small 24B full fine-tuning, 16 x H100 80GB: 65 GB each, TP4."""
