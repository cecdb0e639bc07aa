# SPDX-License-Identifier: Apache-2.0
"""Recipes of vendors with few families, by the kind of model."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.options import LayoutOptions, PretrainOptions, layout

# Dense models of vendors with few families here.
#
# Learning rates and batch sizes of Pythia, and learning rates of StableLM 2, are those of their published training
# configs; the others are our own.

COMMAND_R7B = "CohereForAI/c4ai-command-r7b-12-2024"
COMMAND_R_35B = "CohereForAI/c4ai-command-r-v01"
NANOCHAT_D20 = "nanochat-students/nanochat-d20"
PYTHIA_1P4B = "EleutherAI/pythia-1.4b"
SEED_OSS_36B = "ByteDance-Seed/Seed-OSS-36B-Base"
_PRETRAIN: PretrainOptions = {"seq_length": 4096, "lr": 3e-4}
_PYTHIA: PretrainOptions = {"seq_length": 2048, "global_batch_size": 1024}

afm_4p5b_pretrain_config = pretrain_recipe("arcee-ai/AFM-4.5B-Base", _PRETRAIN)
"""AFM 4.5B pretraining, 8 x H100 80GB: 54 GB each, no model parallelism."""
apertus_8b_pretrain_config = pretrain_recipe("swiss-ai/Apertus-8B-2509", _PRETRAIN, layout(tp=2))
"""Apertus 8B pretraining, 16 x H100 80GB: 42 GB each, TP2."""
command_r7b_pretrain_config = pretrain_recipe(COMMAND_R7B, layout(tp=2), seq_length=8192, lr=3e-4)
"""Command R 7B pretraining, 16 x H100 80GB: 53 GB each, TP2."""
command_r_35b_pretrain_config = pretrain_recipe(COMMAND_R_35B, layout(tp=8), seq_length=8192, lr=2e-4)
"""Command R 35B pretraining, 32 x H100 80GB: 53 GB each, TP8."""
cwm_32b_pretrain_config = pretrain_recipe("facebook/cwm", layout(tp=8), seq_length=8192, lr=2e-4)
"""CWM 32B pretraining, 32 x H100 80GB: 52 GB each, TP8."""
ernie45_300m_pretrain_config = pretrain_recipe("baidu/ERNIE-4.5-0.3B-PT", seq_length=4096, micro_batch_size=4, lr=1e-3)
"""ERNIE 4.5 0.3B pretraining, 8 x H100 80GB: 22 GB each, no model parallelism."""
exaone4_1p2b_pretrain_config = pretrain_recipe("LGAI-EXAONE/EXAONE-4.0-1.2B", seq_length=8192, lr=5e-4)
"""EXAONE 4 1.2B pretraining, 8 x H100 80GB: 28 GB each, no model parallelism."""
falcon_7b_pretrain_config = pretrain_recipe("tiiuae/falcon-7b", seq_length=2048, lr=3e-4)
"""Falcon 7B pretraining, 8 x H100 80GB: 61 GB each, no model parallelism."""
gpt2_124m_pretrain_config = pretrain_recipe("openai-community/gpt2", seq_length=1024, micro_batch_size=16, lr=6e-4)
"""GPT-2 124M pretraining, 8 x H100 80GB: 10 GB each, no model parallelism."""
granite31_8b_pretrain_config = pretrain_recipe("ibm-granite/granite-3.1-8b-base", _PRETRAIN, layout(tp=2))
"""Granite 3.1 8B pretraining, 16 x H100 80GB: 43 GB each, TP2."""
helium_2b_pretrain_config = pretrain_recipe("kyutai/helium-1-preview-2b", _PRETRAIN)
"""Helium 2B pretraining, 8 x H100 80GB: 27 GB each, no model parallelism."""
hunyuan_7b_pretrain_config = pretrain_recipe("tencent/Hunyuan-7B-Instruct", _PRETRAIN, layout(tp=2))
"""Hunyuan 7B pretraining, 16 x H100 80GB: 40 GB each, TP2."""
mimo_7b_pretrain_config = pretrain_recipe("XiaomiMiMo/MiMo-7B-Base", _PRETRAIN, layout(tp=2))
"""MiMo 7B pretraining, 16 x H100 80GB: 41 GB each, TP2."""
nanochat_d20_pretrain_config = pretrain_recipe(NANOCHAT_D20, seq_length=2048, micro_batch_size=8, lr=1e-3)
"""NanoChat d20 561M pretraining, 8 x H100 80GB: 25 GB each, no model parallelism."""
opt_1p3b_pretrain_config = pretrain_recipe("facebook/opt-1.3b", seq_length=2048, micro_batch_size=4, lr=3e-4)
"""OPT 1.3B pretraining, 8 x H100 80GB: 26 GB each, no model parallelism."""
phi2_2p7b_pretrain_config = pretrain_recipe("microsoft/phi-2", seq_length=2048, lr=3e-4)
"""Phi-2 2.7B pretraining, 8 x H100 80GB: 28 GB each, no model parallelism."""
phi35_mini_3p8b_pretrain_config = pretrain_recipe("microsoft/Phi-3.5-mini-instruct", _PRETRAIN)
"""Phi-3.5 mini 3.8B pretraining, 8 x H100 80GB: 44 GB each, no model parallelism."""
phi4_14b_pretrain_config = pretrain_recipe("microsoft/phi-4", _PRETRAIN, layout(tp=2))
"""Phi-4 14B pretraining, 16 x H100 80GB: 72 GB each, TP2."""
pythia_1p4b_pretrain_config = pretrain_recipe(PYTHIA_1P4B, _PYTHIA, micro_batch_size=4, lr=2e-4, min_lr=2e-5)
"""Pythia 1.4B pretraining, 8 x H100 80GB: 27 GB each, no model parallelism."""
seed_oss_36b_pretrain_config = pretrain_recipe(SEED_OSS_36B, layout(tp=8), seq_length=8192, lr=2e-4)
"""Seed-OSS 36B pretraining, 32 x H100 80GB: 61 GB each, TP8."""
stablelm2_1p6b_pretrain_config = pretrain_recipe("stabilityai/stablelm-2-1_6b", seq_length=4096, lr=1e-3, min_lr=1e-4)
"""StableLM 2 1.6B pretraining, 8 x H100 80GB: 22 GB each, no model parallelism."""
starcoder2_7b_pretrain_config = pretrain_recipe("bigcode/starcoder2-7b", _PRETRAIN)
"""StarCoder2 7B pretraining, 16 x H100 80GB: 70 GB each, no model parallelism."""

afm_4p5b_finetune_config = finetune_recipe("arcee-ai/AFM-4.5B-Base", lr=1e-5)
"""AFM 4.5B full fine-tuning, 8 x H100 80GB: 54 GB each, no model parallelism."""
apertus_8b_finetune_config = finetune_recipe("swiss-ai/Apertus-8B-2509", layout(tp=2))
"""Apertus 8B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
command_r7b_finetune_config = finetune_recipe(COMMAND_R7B, layout(tp=2))
"""Command R 7B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
command_r_35b_finetune_config = finetune_recipe(COMMAND_R_35B, layout(tp=8))
"""Command R 35B full fine-tuning, 16 x H100 80GB: 59 GB each, TP8."""
cwm_32b_finetune_config = finetune_recipe("facebook/cwm", layout(tp=8))
"""CWM 32B full fine-tuning, 16 x H100 80GB: 57 GB each, TP8."""
ernie45_300m_finetune_config = finetune_recipe("baidu/ERNIE-4.5-0.3B-PT", micro_batch_size=4, lr=3e-5)
"""ERNIE 4.5 0.3B full fine-tuning, 1 x H100 80GB: 26 GB, no model parallelism."""
exaone4_1p2b_finetune_config = finetune_recipe("LGAI-EXAONE/EXAONE-4.0-1.2B", lr=1e-5)
"""EXAONE 4 1.2B full fine-tuning, 8 x H100 80GB: 19 GB each, no model parallelism."""
falcon_7b_finetune_config = finetune_recipe("tiiuae/falcon-7b", seq_length=2048)
"""Falcon 7B full fine-tuning, 8 x H100 80GB: 61 GB each, no model parallelism."""
gpt2_124m_finetune_config = finetune_recipe("openai-community/gpt2", seq_length=1024, micro_batch_size=16, lr=5e-5)
"""GPT-2 124M full fine-tuning, 1 x H100 80GB: 11 GB, no model parallelism."""
granite31_8b_finetune_config = finetune_recipe("ibm-granite/granite-3.1-8b-base", layout(tp=2))
"""Granite 3.1 8B full fine-tuning, 8 x H100 80GB: 49 GB each, TP2."""
helium_2b_finetune_config = finetune_recipe("kyutai/helium-1-preview-2b", lr=1e-5)
"""Helium 2B full fine-tuning, 8 x H100 80GB: 27 GB each, no model parallelism."""
hunyuan_7b_finetune_config = finetune_recipe("tencent/Hunyuan-7B-Instruct", layout(tp=2))
"""Hunyuan 7B full fine-tuning, 8 x H100 80GB: 46 GB each, TP2."""
mimo_7b_finetune_config = finetune_recipe("XiaomiMiMo/MiMo-7B-Base", layout(tp=2))
"""MiMo 7B full fine-tuning, 8 x H100 80GB: 47 GB each, TP2."""
nanochat_d20_finetune_config = finetune_recipe(NANOCHAT_D20, seq_length=2048, micro_batch_size=4, lr=3e-5)
"""NanoChat d20 561M full fine-tuning, 1 x H100 80GB: 21 GB, no model parallelism."""
opt_1p3b_finetune_config = finetune_recipe("facebook/opt-1.3b", seq_length=2048, micro_batch_size=4, lr=1e-5)
"""OPT 1.3B full fine-tuning, 8 x H100 80GB: 26 GB each, no model parallelism."""
phi2_2p7b_finetune_config = finetune_recipe("microsoft/phi-2", seq_length=2048, lr=1e-5)
"""Phi-2 2.7B full fine-tuning, 8 x H100 80GB: 28 GB each, no model parallelism."""
phi35_mini_3p8b_finetune_config = finetune_recipe("microsoft/Phi-3.5-mini-instruct", lr=1e-5)
"""Phi-3.5 mini 3.8B full fine-tuning, 8 x H100 80GB: 44 GB each, no model parallelism."""
phi4_14b_finetune_config = finetune_recipe("microsoft/phi-4", layout(tp=2))
"""Phi-4 14B full fine-tuning, 16 x H100 80GB: 72 GB each, TP2."""
pythia_1p4b_finetune_config = finetune_recipe(PYTHIA_1P4B, seq_length=2048, micro_batch_size=4, lr=1e-5)
"""Pythia 1.4B full fine-tuning, 8 x H100 80GB: 27 GB each, no model parallelism."""
seed_oss_36b_finetune_config = finetune_recipe(SEED_OSS_36B, layout(tp=8))
"""Seed-OSS 36B full fine-tuning, 16 x H100 80GB: 64 GB each, TP8."""
stablelm2_1p6b_finetune_config = finetune_recipe("stabilityai/stablelm-2-1_6b", lr=1e-5)
"""StableLM 2 1.6B full fine-tuning, 8 x H100 80GB: 22 GB each, no model parallelism."""
starcoder2_7b_finetune_config = finetune_recipe("bigcode/starcoder2-7b", layout(tp=2))
"""StarCoder2 7B full fine-tuning, 8 x H100 80GB: 43 GB each, TP2."""

# Models with experts of vendors with few families here. Learning rates are our own.
#
# dots.llm1 and MiniMax-M2 have 62 layers: the first and the last stage have one layer less than the others.

DOTS_LLM1_142B = "rednote-hilab/dots.llm1.base"
HUNYUAN_80B_A13B = "tencent/Hunyuan-A13B-Instruct"
K_EXAONE_236B = "LGAI-EXAONE/K-EXAONE-236B-A23B"
MINIMAX_M2_229B = "MiniMaxAI/MiniMax-M2"
PHI35_MOE_42B = "microsoft/Phi-3.5-MoE-instruct"
_LARGE: PretrainOptions = {"seq_length": 4096, "global_batch_size": 1024, "lr": 2e-4}
_4_STAGES: LayoutOptions = {"pipeline_layout": "Et*15|t*16|t*16|t*15L"}
_8_STAGES: LayoutOptions = {"pipeline_layout": "Et*7|(t*8|)*6t*7L"}

dots_llm1_142b_pretrain_config = pretrain_recipe(DOTS_LLM1_142B, _4_STAGES, _LARGE, layout(tp=4, pp=4, ep=8, etp=1))
"""dots.llm1 142B-A14B pretraining, 64 x H100 80GB: 68 GB each, TP4 PP4 EP8."""
ernie45_21b_a3b_pretrain_config = pretrain_recipe("baidu/ERNIE-4.5-21B-A3B-PT", layout(ep=8), seq_length=4096, lr=3e-4)
"""ERNIE 4.5 21B-A3B pretraining, 16 x H100 80GB: 59 GB each, EP8."""
granite31_1b_a400m_pretrain_config = pretrain_recipe("ibm-granite/granite-3.1-1b-a400m-base", seq_length=4096, lr=5e-4)
"""Granite 3.1 1B-A400M pretraining, 8 x H100 80GB: 17 GB each, no model parallelism."""
hunyuan_80b_a13b_pretrain_config = pretrain_recipe(HUNYUAN_80B_A13B, _LARGE, layout(tp=2, pp=2, ep=8, etp=1))
"""Hunyuan 80B-A13B pretraining, 64 x H100 80GB: 70 GB each, TP2 PP2 EP8."""
k_exaone_236b_pretrain_config = pretrain_recipe(K_EXAONE_236B, _LARGE, layout(tp=4, pp=4, ep=16, etp=1))
"""K-EXAONE 236B-A23B pretraining, 128 x H100 80GB: 62 GB each, TP4 PP4 EP16."""
minimax_m2_229b_pretrain_config = pretrain_recipe(MINIMAX_M2_229B, _8_STAGES, _LARGE, layout(tp=2, pp=8, ep=8, etp=1))
"""MiniMax-M2 229B-A10B pretraining, 128 x H100 80GB: 68 GB each, TP2 PP8 EP8."""
phi35_moe_42b_pretrain_config = pretrain_recipe(PHI35_MOE_42B, _PRETRAIN, layout(tp=2, pp=2, ep=8, etp=1))
"""Phi-3.5-MoE 42B-A7B pretraining, 16 x H100 80GB: 60 GB each, TP2 PP2 EP8."""
solar_open_100b_pretrain_config = pretrain_recipe("upstage/Solar-Open-100B", _LARGE, layout(tp=4, pp=2, ep=8, etp=1))
"""Solar Open 100B pretraining, 64 x H100 80GB: 72 GB each, TP4 PP2 EP8."""
trinity_mini_26b_pretrain_config = pretrain_recipe("arcee-ai/Trinity-Mini", layout(ep=8), seq_length=4096, lr=3e-4)
"""Trinity Mini 26B-A3B pretraining, 32 x H100 80GB: 64 GB each, EP8."""

dots_llm1_142b_finetune_config = finetune_recipe(DOTS_LLM1_142B, _4_STAGES, layout(tp=4, pp=4, ep=8, etp=1))
"""dots.llm1 142B-A14B full fine-tuning, 64 x H100 80GB: 68 GB each, TP4 PP4 EP8."""
ernie45_21b_a3b_finetune_config = finetune_recipe("baidu/ERNIE-4.5-21B-A3B-PT", layout(ep=8))
"""ERNIE 4.5 21B-A3B full fine-tuning, 16 x H100 80GB: 59 GB each, EP8."""
granite31_1b_a400m_finetune_config = finetune_recipe("ibm-granite/granite-3.1-1b-a400m-base", lr=1e-5)
"""Granite 3.1 1B-A400M full fine-tuning, 8 x H100 80GB: 17 GB each, no model parallelism."""
hunyuan_80b_a13b_finetune_config = finetune_recipe(HUNYUAN_80B_A13B, layout(tp=2, pp=2, ep=8, etp=1))
"""Hunyuan 80B-A13B full fine-tuning, 64 x H100 80GB: 70 GB each, TP2 PP2 EP8."""
k_exaone_236b_finetune_config = finetune_recipe(K_EXAONE_236B, layout(tp=4, pp=4, ep=16, etp=1))
"""K-EXAONE 236B-A23B full fine-tuning, 128 x H100 80GB: 62 GB each, TP4 PP4 EP16."""
minimax_m2_229b_finetune_config = finetune_recipe(MINIMAX_M2_229B, _8_STAGES, layout(tp=2, pp=8, ep=8, etp=1))
"""MiniMax-M2 229B-A10B full fine-tuning, 128 x H100 80GB: 68 GB each, TP2 PP8 EP8."""
phi35_moe_42b_finetune_config = finetune_recipe(PHI35_MOE_42B, layout(tp=2, pp=2, ep=8, etp=1))
"""Phi-3.5-MoE 42B-A7B full fine-tuning, 16 x H100 80GB: 60 GB each, TP2 PP2 EP8."""
solar_open_100b_finetune_config = finetune_recipe("upstage/Solar-Open-100B", layout(tp=4, pp=2, ep=8, etp=1))
"""Solar Open 100B full fine-tuning, 64 x H100 80GB: 72 GB each, TP4 PP2 EP8."""
trinity_mini_26b_finetune_config = finetune_recipe("arcee-ai/Trinity-Mini", layout(tp=2, ep=8, etp=1))
"""Trinity Mini 26B-A3B full fine-tuning, 16 x H100 80GB: 56 GB each, TP2 EP8."""

# Models with mixers or short convolutions in the place of attention, or beside it. Learning rates are our own.


bamba_9b_pretrain_config = pretrain_recipe("ibm-fms/Bamba-9B", _PRETRAIN, layout(tp=2))
"""Bamba 9B pretraining, 16 x H100 80GB: 52 GB each, TP2."""
codestral_mamba_7b_pretrain_config = pretrain_recipe("mistralai/Mamba-Codestral-7B-v0.1", _PRETRAIN, layout(tp=2))
"""Codestral Mamba 7B pretraining, 16 x H100 80GB: 43 GB each, TP2."""
falcon_h1_500m_pretrain_config = pretrain_recipe("tiiuae/Falcon-H1-0.5B-Base", _PRETRAIN, micro_batch_size=4)
"""Falcon-H1 0.5B pretraining, 8 x H100 80GB: 30 GB each, no model parallelism."""
granite4_h_tiny_pretrain_config = pretrain_recipe("ibm-granite/granite-4.0-h-tiny", _PRETRAIN)
"""Granite 4 H-Tiny 7B-A1B pretraining, 8 x H100 80GB: 68 GB each, no model parallelism."""
jamba_52b_pretrain_config = pretrain_recipe("ai21labs/Jamba-v0.1", _PRETRAIN, layout(tp=4, ep=8, etp=1))
"""Jamba 52B-A12B pretraining, 32 x H100 80GB: 72 GB each, TP4 EP8."""
lfm2_1p2b_pretrain_config = pretrain_recipe("LiquidAI/LFM2-1.2B", _PRETRAIN)
"""LFM2 1.2B pretraining, 8 x H100 80GB: 16 GB each, no model parallelism."""
lfm2_8b_a1b_pretrain_config = pretrain_recipe("LiquidAI/LFM2-8B-A1B", _PRETRAIN, layout(ep=2))
"""LFM2 8B-A1B pretraining, 8 x H100 80GB: 50 GB each, EP2."""

bamba_9b_finetune_config = finetune_recipe("ibm-fms/Bamba-9B", layout(tp=2))
"""Bamba 9B full fine-tuning, 8 x H100 80GB: 59 GB each, TP2."""
codestral_mamba_7b_finetune_config = finetune_recipe("mistralai/Mamba-Codestral-7B-v0.1", layout(tp=2))
"""Codestral Mamba 7B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
falcon_h1_500m_finetune_config = finetune_recipe("tiiuae/Falcon-H1-0.5B-Base", lr=3e-5)
"""Falcon-H1 0.5B full fine-tuning, 1 x H100 80GB: 16 GB, no model parallelism."""
granite4_h_tiny_finetune_config = finetune_recipe("ibm-granite/granite-4.0-h-tiny", lr=1e-5)
"""Granite 4 H-Tiny 7B-A1B full fine-tuning, 8 x H100 80GB: 68 GB each, no model parallelism."""
jamba_52b_finetune_config = finetune_recipe("ai21labs/Jamba-v0.1", layout(tp=4, ep=8, etp=1))
"""Jamba 52B-A12B full fine-tuning, 32 x H100 80GB: 72 GB each, TP4 EP8."""
lfm2_1p2b_finetune_config = finetune_recipe("LiquidAI/LFM2-1.2B", lr=1e-5)
"""LFM2 1.2B full fine-tuning, 8 x H100 80GB: 16 GB each, no model parallelism."""
lfm2_8b_a1b_finetune_config = finetune_recipe("LiquidAI/LFM2-8B-A1B", layout(ep=2))
"""LFM2 8B-A1B full fine-tuning, 8 x H100 80GB: 50 GB each, EP2."""

name_functions(__name__)
