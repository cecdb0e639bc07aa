# SPDX-License-Identifier: Apache-2.0
"""Models with experts of vendors with few families here. Learning rates are our own.

dots.llm1 and MiniMax-M2 have 62 layers: the first and the last stage have one layer less than the others.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import LayoutOptions, PretrainOptions, layout

DOTS_LLM1_142B = "rednote-hilab/dots.llm1.base"
HUNYUAN_80B_A13B = "tencent/Hunyuan-A13B-Instruct"
K_EXAONE_236B = "LGAI-EXAONE/K-EXAONE-236B-A23B"
MINIMAX_M2_229B = "MiniMaxAI/MiniMax-M2"
_LARGE: PretrainOptions = {"seq_length": 4096, "global_batch_size": 1024, "lr": 2e-4}
_4_STAGES: LayoutOptions = {"pipeline_layout": "Et*15|t*16|t*16|t*15L"}
_8_STAGES: LayoutOptions = {"pipeline_layout": "Et*7|(t*8|)*6t*7L"}

dots_llm1_142b_pretrain_config = pretrain_recipe(DOTS_LLM1_142B, _4_STAGES, _LARGE, layout(tp=4, pp=4, ep=8, etp=1))
"""dots.llm1 142B-A14B pretraining, 64 x H100 80GB: 68 GB each, TP4 PP4 EP8."""
ernie45_21b_a3b_pretrain_config = pretrain_recipe("baidu/ERNIE-4.5-21B-A3B-PT", layout(ep=8), seq_length=4096, lr=3e-4)
"""ERNIE 4.5 21B-A3B pretraining, 16 x H100 80GB: 60 GB each, EP8."""
granite31_1b_a400m_pretrain_config = pretrain_recipe("ibm-granite/granite-3.1-1b-a400m-base", seq_length=4096, lr=5e-4)
"""Granite 3.1 1B-A400M pretraining, 8 x H100 80GB: 17 GB each, no model parallelism."""
hunyuan_80b_a13b_pretrain_config = pretrain_recipe(HUNYUAN_80B_A13B, _LARGE, layout(tp=2, pp=2, ep=8, etp=1))
"""Hunyuan 80B-A13B pretraining, 64 x H100 80GB: 71 GB each, TP2 PP2 EP8."""
k_exaone_236b_pretrain_config = pretrain_recipe(K_EXAONE_236B, _LARGE, layout(tp=4, pp=4, ep=16, etp=1))
"""K-EXAONE 236B-A23B pretraining, 128 x H100 80GB: 63 GB each, TP4 PP4 EP16."""
minimax_m2_229b_pretrain_config = pretrain_recipe(MINIMAX_M2_229B, _8_STAGES, _LARGE, layout(tp=2, pp=8, ep=8, etp=1))
"""MiniMax-M2 229B-A10B pretraining, 128 x H100 80GB: 69 GB each, TP2 PP8 EP8."""
solar_open_100b_pretrain_config = pretrain_recipe("upstage/Solar-Open-100B", _LARGE, layout(tp=4, pp=2, ep=8, etp=1))
"""Solar Open 100B pretraining, 64 x H100 80GB: 72 GB each, TP4 PP2 EP8."""
trinity_mini_26b_pretrain_config = pretrain_recipe("arcee-ai/Trinity-Mini", layout(ep=8), seq_length=4096, lr=3e-4)
"""Trinity Mini 26B-A3B pretraining, 32 x H100 80GB: 64 GB each, EP8."""

dots_llm1_142b_finetune_config = finetune_recipe(DOTS_LLM1_142B, _4_STAGES, layout(tp=4, pp=4, ep=8, etp=1))
"""dots.llm1 142B-A14B full fine-tuning, 64 x H100 80GB: 68 GB each, TP4 PP4 EP8."""
ernie45_21b_a3b_finetune_config = finetune_recipe("baidu/ERNIE-4.5-21B-A3B-PT", layout(ep=8))
"""ERNIE 4.5 21B-A3B full fine-tuning, 16 x H100 80GB: 60 GB each, EP8."""
granite31_1b_a400m_finetune_config = finetune_recipe("ibm-granite/granite-3.1-1b-a400m-base", lr=1e-5)
"""Granite 3.1 1B-A400M full fine-tuning, 8 x H100 80GB: 17 GB each, no model parallelism."""
hunyuan_80b_a13b_finetune_config = finetune_recipe(HUNYUAN_80B_A13B, layout(tp=2, pp=2, ep=8, etp=1))
"""Hunyuan 80B-A13B full fine-tuning, 64 x H100 80GB: 71 GB each, TP2 PP2 EP8."""
k_exaone_236b_finetune_config = finetune_recipe(K_EXAONE_236B, layout(tp=4, pp=4, ep=16, etp=1))
"""K-EXAONE 236B-A23B full fine-tuning, 128 x H100 80GB: 63 GB each, TP4 PP4 EP16."""
minimax_m2_229b_finetune_config = finetune_recipe(MINIMAX_M2_229B, _8_STAGES, layout(tp=2, pp=8, ep=8, etp=1))
"""MiniMax-M2 229B-A10B full fine-tuning, 128 x H100 80GB: 69 GB each, TP2 PP8 EP8."""
solar_open_100b_finetune_config = finetune_recipe("upstage/Solar-Open-100B", layout(tp=4, pp=2, ep=8, etp=1))
"""Solar Open 100B full fine-tuning, 64 x H100 80GB: 72 GB each, TP4 PP2 EP8."""
trinity_mini_26b_finetune_config = finetune_recipe("arcee-ai/Trinity-Mini", layout(tp=2, ep=8, etp=1))
"""Trinity Mini 26B-A3B full fine-tuning, 16 x H100 80GB: 56 GB each, TP2 EP8."""
