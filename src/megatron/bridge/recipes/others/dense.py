# SPDX-License-Identifier: Apache-2.0
"""Dense models of vendors with few families here.

Learning rates and batch sizes of Pythia, and learning rates of StableLM 2, are those of their published training
configs; the others are our own.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import PretrainOptions, layout
from megatron.bridge.recipes.sizes import size_of

AFM_4P5B = size_of("arcee-ai/AFM-4.5B-Base")
APERTUS_8B = size_of("swiss-ai/Apertus-8B-2509")
COMMAND_R7B = size_of("CohereForAI/c4ai-command-r7b-12-2024")
COMMAND_R_35B = size_of("CohereForAI/c4ai-command-r-v01")
CWM_32B = size_of("facebook/cwm")
ERNIE45_300M = size_of("baidu/ERNIE-4.5-0.3B-PT")
EXAONE4_1P2B = size_of("LGAI-EXAONE/EXAONE-4.0-1.2B")
FALCON_7B = size_of("tiiuae/falcon-7b")
GPT2_124M = size_of("openai-community/gpt2")
GRANITE31_8B = size_of("ibm-granite/granite-3.1-8b-base")
HELIUM_2B = size_of("kyutai/helium-1-preview-2b")
HUNYUAN_7B = size_of("tencent/Hunyuan-7B-Instruct")
NANOCHAT_D20 = size_of("nanochat-students/nanochat-d20")
OPT_1P3B = size_of("facebook/opt-1.3b")
PHI2_2P7B = size_of("microsoft/phi-2")
PHI35_MINI_3P8B = size_of("microsoft/Phi-3.5-mini-instruct")
PHI4_14B = size_of("microsoft/phi-4")
PYTHIA_1P4B = size_of("EleutherAI/pythia-1.4b")
SEED_OSS_36B = size_of("ByteDance-Seed/Seed-OSS-36B-Base")
STABLELM2_1P6B = size_of("stabilityai/stablelm-2-1_6b")
STARCODER2_7B = size_of("bigcode/starcoder2-7b")
_PRETRAIN: PretrainOptions = {"seq_length": 4096, "lr": 3e-4}
_PYTHIA: PretrainOptions = {"seq_length": 2048, "global_batch_size": 1024}

afm_4p5b_pretrain_config = pretrain_recipe(AFM_4P5B, _PRETRAIN)
"""AFM 4.5B pretraining, 8 x H100 80GB: 54 GB each, no model parallelism."""
apertus_8b_pretrain_config = pretrain_recipe(APERTUS_8B, _PRETRAIN, layout(tp=2))
"""Apertus 8B pretraining, 16 x H100 80GB: 42 GB each, TP2."""
command_r7b_pretrain_config = pretrain_recipe(COMMAND_R7B, layout(tp=2), seq_length=8192, lr=3e-4)
"""Command R7B pretraining, 16 x H100 80GB: 53 GB each, TP2."""
command_r_35b_pretrain_config = pretrain_recipe(COMMAND_R_35B, layout(tp=8), seq_length=8192, lr=2e-4)
"""Command R 35B pretraining, 32 x H100 80GB: 53 GB each, TP8."""
cwm_32b_pretrain_config = pretrain_recipe(CWM_32B, layout(tp=8), seq_length=8192, lr=2e-4)
"""CWM 32B pretraining, 32 x H100 80GB: 52 GB each, TP8."""
ernie45_300m_pretrain_config = pretrain_recipe(ERNIE45_300M, seq_length=4096, micro_batch_size=4, lr=1e-3)
"""ERNIE 4.5 0.3B pretraining, 8 x H100 80GB: 22 GB each, no model parallelism."""
exaone4_1p2b_pretrain_config = pretrain_recipe(EXAONE4_1P2B, seq_length=8192, lr=5e-4)
"""EXAONE 4 1.2B pretraining, 8 x H100 80GB: 28 GB each, no model parallelism."""
falcon_7b_pretrain_config = pretrain_recipe(FALCON_7B, seq_length=2048, lr=3e-4)
"""Falcon 7B pretraining, 8 x H100 80GB: 61 GB each, no model parallelism."""
gpt2_124m_pretrain_config = pretrain_recipe(GPT2_124M, seq_length=1024, micro_batch_size=16, lr=6e-4)
"""GPT-2 124M pretraining, 8 x H100 80GB: 10 GB each, no model parallelism."""
granite31_8b_pretrain_config = pretrain_recipe(GRANITE31_8B, _PRETRAIN, layout(tp=2))
"""Granite 3.1 8B pretraining, 16 x H100 80GB: 43 GB each, TP2."""
helium_2b_pretrain_config = pretrain_recipe(HELIUM_2B, _PRETRAIN)
"""Helium 2B pretraining, 8 x H100 80GB: 27 GB each, no model parallelism."""
hunyuan_7b_pretrain_config = pretrain_recipe(HUNYUAN_7B, _PRETRAIN, layout(tp=2))
"""Hunyuan 7B pretraining, 16 x H100 80GB: 40 GB each, TP2."""
nanochat_d20_pretrain_config = pretrain_recipe(NANOCHAT_D20, seq_length=2048, micro_batch_size=8, lr=1e-3)
"""NanoChat d20 (561M) pretraining, 8 x H100 80GB: 25 GB each, no model parallelism."""
opt_1p3b_pretrain_config = pretrain_recipe(OPT_1P3B, seq_length=2048, micro_batch_size=4, lr=3e-4)
"""OPT 1.3B pretraining, 8 x H100 80GB: 26 GB each, no model parallelism."""
phi2_2p7b_pretrain_config = pretrain_recipe(PHI2_2P7B, seq_length=2048, lr=3e-4)
"""Phi-2 2.7B pretraining, 8 x H100 80GB: 28 GB each, no model parallelism."""
phi35_mini_3p8b_pretrain_config = pretrain_recipe(PHI35_MINI_3P8B, _PRETRAIN)
"""Phi-3.5 mini 3.8B pretraining, 8 x H100 80GB: 44 GB each, no model parallelism."""
phi4_14b_pretrain_config = pretrain_recipe(PHI4_14B, _PRETRAIN, layout(tp=2))
"""Phi-4 14B pretraining, 16 x H100 80GB: 72 GB each, TP2."""
pythia_1p4b_pretrain_config = pretrain_recipe(PYTHIA_1P4B, _PYTHIA, micro_batch_size=4, lr=2e-4, min_lr=2e-5)
"""Pythia 1.4B pretraining, 8 x H100 80GB: 27 GB each, no model parallelism."""
seed_oss_36b_pretrain_config = pretrain_recipe(SEED_OSS_36B, layout(tp=8), seq_length=8192, lr=2e-4)
"""Seed-OSS 36B pretraining, 32 x H100 80GB: 61 GB each, TP8."""
stablelm2_1p6b_pretrain_config = pretrain_recipe(STABLELM2_1P6B, seq_length=4096, lr=1e-3, min_lr=1e-4)
"""StableLM 2 1.6B pretraining, 8 x H100 80GB: 22 GB each, no model parallelism."""
starcoder2_7b_pretrain_config = pretrain_recipe(STARCODER2_7B, _PRETRAIN)
"""StarCoder2 7B pretraining, 16 x H100 80GB: 70 GB each, no model parallelism."""

afm_4p5b_finetune_config = finetune_recipe(AFM_4P5B, lr=1e-5)
"""AFM 4.5B full fine-tuning, 8 x H100 80GB: 54 GB each, no model parallelism."""
apertus_8b_finetune_config = finetune_recipe(APERTUS_8B, layout(tp=2))
"""Apertus 8B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
command_r7b_finetune_config = finetune_recipe(COMMAND_R7B, layout(tp=2))
"""Command R7B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
command_r_35b_finetune_config = finetune_recipe(COMMAND_R_35B, layout(tp=8))
"""Command R 35B full fine-tuning, 16 x H100 80GB: 59 GB each, TP8."""
cwm_32b_finetune_config = finetune_recipe(CWM_32B, layout(tp=8))
"""CWM 32B full fine-tuning, 16 x H100 80GB: 57 GB each, TP8."""
ernie45_300m_finetune_config = finetune_recipe(ERNIE45_300M, micro_batch_size=4, lr=3e-5)
"""ERNIE 4.5 0.3B full fine-tuning, 1 x H100 80GB: 26 GB, no model parallelism."""
exaone4_1p2b_finetune_config = finetune_recipe(EXAONE4_1P2B, lr=1e-5)
"""EXAONE 4 1.2B full fine-tuning, 8 x H100 80GB: 19 GB each, no model parallelism."""
falcon_7b_finetune_config = finetune_recipe(FALCON_7B, seq_length=2048)
"""Falcon 7B full fine-tuning, 8 x H100 80GB: 61 GB each, no model parallelism."""
gpt2_124m_finetune_config = finetune_recipe(GPT2_124M, seq_length=1024, micro_batch_size=16, lr=5e-5)
"""GPT-2 124M full fine-tuning, 1 x H100 80GB: 11 GB, no model parallelism."""
granite31_8b_finetune_config = finetune_recipe(GRANITE31_8B, layout(tp=2))
"""Granite 3.1 8B full fine-tuning, 8 x H100 80GB: 49 GB each, TP2."""
helium_2b_finetune_config = finetune_recipe(HELIUM_2B, lr=1e-5)
"""Helium 2B full fine-tuning, 8 x H100 80GB: 27 GB each, no model parallelism."""
hunyuan_7b_finetune_config = finetune_recipe(HUNYUAN_7B, layout(tp=2))
"""Hunyuan 7B full fine-tuning, 8 x H100 80GB: 46 GB each, TP2."""
nanochat_d20_finetune_config = finetune_recipe(NANOCHAT_D20, seq_length=2048, micro_batch_size=4, lr=3e-5)
"""NanoChat d20 (561M) full fine-tuning, 1 x H100 80GB: 21 GB, no model parallelism."""
opt_1p3b_finetune_config = finetune_recipe(OPT_1P3B, seq_length=2048, micro_batch_size=4, lr=1e-5)
"""OPT 1.3B full fine-tuning, 8 x H100 80GB: 26 GB each, no model parallelism."""
phi2_2p7b_finetune_config = finetune_recipe(PHI2_2P7B, seq_length=2048, lr=1e-5)
"""Phi-2 2.7B full fine-tuning, 8 x H100 80GB: 28 GB each, no model parallelism."""
phi35_mini_3p8b_finetune_config = finetune_recipe(PHI35_MINI_3P8B, lr=1e-5)
"""Phi-3.5 mini 3.8B full fine-tuning, 8 x H100 80GB: 44 GB each, no model parallelism."""
phi4_14b_finetune_config = finetune_recipe(PHI4_14B, layout(tp=2))
"""Phi-4 14B full fine-tuning, 16 x H100 80GB: 72 GB each, TP2."""
pythia_1p4b_finetune_config = finetune_recipe(PYTHIA_1P4B, seq_length=2048, micro_batch_size=4, lr=1e-5)
"""Pythia 1.4B full fine-tuning, 8 x H100 80GB: 27 GB each, no model parallelism."""
seed_oss_36b_finetune_config = finetune_recipe(SEED_OSS_36B, layout(tp=8))
"""Seed-OSS 36B full fine-tuning, 16 x H100 80GB: 64 GB each, TP8."""
stablelm2_1p6b_finetune_config = finetune_recipe(STABLELM2_1P6B, lr=1e-5)
"""StableLM 2 1.6B full fine-tuning, 8 x H100 80GB: 22 GB each, no model parallelism."""
starcoder2_7b_finetune_config = finetune_recipe(STARCODER2_7B, layout(tp=2))
"""StarCoder2 7B full fine-tuning, 8 x H100 80GB: 43 GB each, TP2."""
