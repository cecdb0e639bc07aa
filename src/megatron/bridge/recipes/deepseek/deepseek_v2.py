# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2. Learning rates, and the batch size of V2-Lite, are from "DeepSeek-V2" (2024)."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import PretrainOptions, layout

DEEPSEEK_V2_LITE = "deepseek-ai/DeepSeek-V2-Lite"
_PRETRAIN: PretrainOptions = {"seq_length": 4096, "global_batch_size": 4608}
_LAYOUT = layout(tp=8, pp=4, vp=5, ep=16, etp=1)

deepseek_v2_lite_pretrain_config = pretrain_recipe(DEEPSEEK_V2_LITE, _PRETRAIN, layout(ep=8), lr=4.2e-4, min_lr=4.2e-5)
"""DeepSeek-V2-Lite 16B pretraining, 8 x H100 80GB: 61 GB each, EP8."""
deepseek_v2_pretrain_config = pretrain_recipe("deepseek-ai/DeepSeek-V2", _PRETRAIN, _LAYOUT, lr=2.4e-4, min_lr=2.4e-5)
"""DeepSeek-V2 236B pretraining, 128 x H100 80GB: 60 GB each, TP8 PP4 EP16."""

deepseek_v2_lite_finetune_config = finetune_recipe(DEEPSEEK_V2_LITE, layout(ep=8))
"""DeepSeek-V2-Lite 16B full fine-tuning, 8 x H100 80GB: 61 GB each, EP8."""
deepseek_v2_finetune_config = finetune_recipe("deepseek-ai/DeepSeek-V2", _LAYOUT)
"""DeepSeek-V2 236B full fine-tuning, 128 x H100 80GB: 60 GB each, TP8 PP4 EP16."""
