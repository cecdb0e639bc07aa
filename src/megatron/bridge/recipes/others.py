# SPDX-License-Identifier: Apache-2.0
"""Recipes of vendors with few families, by the kind of model."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import LayoutOptions, PretrainOptions, layout

# Dense models of vendors with few families here.
#
# Learning rates and batch sizes of Pythia, and learning rates of StableLM 2, are from their published training
# configs; the others are our own.

COMMAND_R7B = "CohereForAI/c4ai-command-r7b-12-2024"
COMMAND_R_35B = "CohereForAI/c4ai-command-r-v01"
NANOCHAT_D20 = "nanochat-students/nanochat-d20"
PYTHIA_1P4B = "EleutherAI/pythia-1.4b"
SEED_OSS_36B = "ByteDance-Seed/Seed-OSS-36B-Base"
_PRETRAIN: PretrainOptions = {"seq_length": 4096, "lr": 3e-4}
_PYTHIA: PretrainOptions = {"seq_length": 2048, "global_batch_size": 1024}

afm_4p5b_pretrain_config = pretrain_recipe(
    "arcee-ai/AFM-4.5B-Base", _PRETRAIN, what="AFM 4.5B pretraining", gpus=8, memory_gb=54
)
apertus_8b_pretrain_config = pretrain_recipe(
    "swiss-ai/Apertus-8B-2509",
    _PRETRAIN,
    layout(tp=2),
    what="Apertus 8B pretraining",
    gpus=16,
    memory_gb=42,
)
command_r7b_pretrain_config = pretrain_recipe(
    COMMAND_R7B,
    layout(tp=2),
    what="Command R 7B pretraining",
    gpus=16,
    memory_gb=54,
    seq_length=8192,
    lr=3e-4,
)
command_r_35b_pretrain_config = pretrain_recipe(
    COMMAND_R_35B,
    layout(tp=8),
    what="Command R 35B pretraining",
    gpus=32,
    memory_gb=53,
    seq_length=8192,
    lr=2e-4,
)
cwm_32b_pretrain_config = pretrain_recipe(
    "facebook/cwm",
    layout(tp=8),
    what="CWM 32B pretraining",
    gpus=32,
    memory_gb=52,
    seq_length=8192,
    lr=2e-4,
)
ernie45_300m_pretrain_config = pretrain_recipe(
    "baidu/ERNIE-4.5-0.3B-PT",
    what="ERNIE 4.5 0.3B pretraining",
    gpus=8,
    memory_gb=22,
    seq_length=4096,
    micro_batch_size=4,
    lr=1e-3,
)
exaone4_1p2b_pretrain_config = pretrain_recipe(
    "LGAI-EXAONE/EXAONE-4.0-1.2B",
    what="EXAONE 4 1.2B pretraining",
    gpus=8,
    memory_gb=28,
    seq_length=8192,
    lr=5e-4,
)
falcon_7b_pretrain_config = pretrain_recipe(
    "tiiuae/falcon-7b", what="Falcon 7B pretraining", gpus=8, memory_gb=61, seq_length=2048, lr=3e-4
)
gpt2_124m_pretrain_config = pretrain_recipe(
    "openai-community/gpt2",
    what="GPT-2 124M pretraining",
    gpus=8,
    memory_gb=10,
    seq_length=1024,
    micro_batch_size=16,
    lr=6e-4,
)
granite31_8b_pretrain_config = pretrain_recipe(
    "ibm-granite/granite-3.1-8b-base",
    _PRETRAIN,
    layout(tp=2),
    what="Granite 3.1 8B pretraining",
    gpus=16,
    memory_gb=43,
)
helium_2b_pretrain_config = pretrain_recipe(
    "kyutai/helium-1-preview-2b", _PRETRAIN, what="Helium 2B pretraining", gpus=8, memory_gb=27
)
hunyuan_7b_pretrain_config = pretrain_recipe(
    "tencent/Hunyuan-7B-Instruct",
    _PRETRAIN,
    layout(tp=2),
    what="Hunyuan 7B pretraining",
    gpus=16,
    memory_gb=40,
)
mimo_7b_pretrain_config = pretrain_recipe(
    "XiaomiMiMo/MiMo-7B-Base",
    _PRETRAIN,
    layout(tp=2),
    what="MiMo 7B pretraining",
    gpus=16,
    memory_gb=42,
)
nanochat_d20_pretrain_config = pretrain_recipe(
    NANOCHAT_D20,
    what="NanoChat d20 561M pretraining",
    gpus=8,
    memory_gb=25,
    seq_length=2048,
    micro_batch_size=8,
    lr=1e-3,
)
opt_1p3b_pretrain_config = pretrain_recipe(
    "facebook/opt-1.3b",
    what="OPT 1.3B pretraining",
    gpus=8,
    memory_gb=26,
    seq_length=2048,
    micro_batch_size=4,
    lr=3e-4,
)
phi2_2p7b_pretrain_config = pretrain_recipe(
    "microsoft/phi-2",
    what="Phi-2 2.7B pretraining",
    gpus=8,
    memory_gb=47,
    micro_batch_size=4,
    seq_length=2048,
    lr=3e-4,
)
phi35_mini_3p8b_pretrain_config = pretrain_recipe(
    "microsoft/Phi-3.5-mini-instruct",
    _PRETRAIN,
    what="Phi-3.5 mini 3.8B pretraining",
    gpus=8,
    memory_gb=44,
)
phi4_14b_pretrain_config = pretrain_recipe(
    "microsoft/phi-4", _PRETRAIN, layout(tp=2), what="Phi-4 14B pretraining", gpus=16, memory_gb=72
)
pythia_1p4b_pretrain_config = pretrain_recipe(
    PYTHIA_1P4B,
    _PYTHIA,
    what="Pythia 1.4B pretraining",
    gpus=8,
    memory_gb=27,
    micro_batch_size=4,
    lr=2e-4,
    min_lr=2e-5,
)
seed_oss_36b_pretrain_config = pretrain_recipe(
    SEED_OSS_36B,
    layout(tp=8),
    what="Seed-OSS 36B pretraining",
    gpus=32,
    memory_gb=61,
    seq_length=8192,
    lr=2e-4,
)
stablelm2_1p6b_pretrain_config = pretrain_recipe(
    "stabilityai/stablelm-2-1_6b",
    what="StableLM 2 1.6B pretraining",
    gpus=8,
    memory_gb=22,
    seq_length=4096,
    lr=1e-3,
    min_lr=1e-4,
)
starcoder2_7b_pretrain_config = pretrain_recipe(
    "bigcode/starcoder2-7b", _PRETRAIN, what="StarCoder2 7B pretraining", gpus=16, memory_gb=70
)

afm_4p5b_finetune_config = finetune_recipe(
    "arcee-ai/AFM-4.5B-Base", what="AFM 4.5B full fine-tuning", gpus=8, memory_gb=54, lr=1e-5
)
apertus_8b_finetune_config = finetune_recipe(
    "swiss-ai/Apertus-8B-2509",
    layout(tp=2),
    what="Apertus 8B full fine-tuning",
    gpus=8,
    memory_gb=48,
)
command_r7b_finetune_config = finetune_recipe(
    COMMAND_R7B, layout(tp=2), what="Command R 7B full fine-tuning", gpus=8, memory_gb=48
)
command_r_35b_finetune_config = finetune_recipe(
    COMMAND_R_35B, layout(tp=8), what="Command R 35B full fine-tuning", gpus=16, memory_gb=59
)
cwm_32b_finetune_config = finetune_recipe(
    "facebook/cwm", layout(tp=8), what="CWM 32B full fine-tuning", gpus=16, memory_gb=57
)
ernie45_300m_finetune_config = finetune_recipe(
    "baidu/ERNIE-4.5-0.3B-PT",
    what="ERNIE 4.5 0.3B full fine-tuning",
    gpus=1,
    memory_gb=26,
    micro_batch_size=4,
    lr=3e-5,
)
exaone4_1p2b_finetune_config = finetune_recipe(
    "LGAI-EXAONE/EXAONE-4.0-1.2B",
    what="EXAONE 4 1.2B full fine-tuning",
    gpus=8,
    memory_gb=19,
    lr=1e-5,
)
falcon_7b_finetune_config = finetune_recipe(
    "tiiuae/falcon-7b", what="Falcon 7B full fine-tuning", gpus=8, memory_gb=61, seq_length=2048
)
gpt2_124m_finetune_config = finetune_recipe(
    "openai-community/gpt2",
    what="GPT-2 124M full fine-tuning",
    gpus=1,
    memory_gb=11,
    seq_length=1024,
    micro_batch_size=16,
    lr=5e-5,
)
granite31_8b_finetune_config = finetune_recipe(
    "ibm-granite/granite-3.1-8b-base",
    layout(tp=2),
    what="Granite 3.1 8B full fine-tuning",
    gpus=8,
    memory_gb=49,
)
helium_2b_finetune_config = finetune_recipe(
    "kyutai/helium-1-preview-2b", what="Helium 2B full fine-tuning", gpus=8, memory_gb=27, lr=1e-5
)
hunyuan_7b_finetune_config = finetune_recipe(
    "tencent/Hunyuan-7B-Instruct",
    layout(tp=2),
    what="Hunyuan 7B full fine-tuning",
    gpus=8,
    memory_gb=46,
)
mimo_7b_finetune_config = finetune_recipe(
    "XiaomiMiMo/MiMo-7B-Base", layout(tp=2), what="MiMo 7B full fine-tuning", gpus=8, memory_gb=48
)
nanochat_d20_finetune_config = finetune_recipe(
    NANOCHAT_D20,
    what="NanoChat d20 561M full fine-tuning",
    gpus=1,
    memory_gb=21,
    seq_length=2048,
    micro_batch_size=4,
    lr=3e-5,
)
opt_1p3b_finetune_config = finetune_recipe(
    "facebook/opt-1.3b",
    what="OPT 1.3B full fine-tuning",
    gpus=8,
    memory_gb=26,
    seq_length=2048,
    micro_batch_size=4,
    lr=1e-5,
)
phi2_2p7b_finetune_config = finetune_recipe(
    "microsoft/phi-2",
    what="Phi-2 2.7B full fine-tuning",
    gpus=8,
    memory_gb=28,
    seq_length=2048,
    lr=1e-5,
)
phi35_mini_3p8b_finetune_config = finetune_recipe(
    "microsoft/Phi-3.5-mini-instruct",
    what="Phi-3.5 mini 3.8B full fine-tuning",
    gpus=8,
    memory_gb=44,
    lr=1e-5,
)
phi4_14b_finetune_config = finetune_recipe(
    "microsoft/phi-4", layout(tp=2), what="Phi-4 14B full fine-tuning", gpus=16, memory_gb=72
)
pythia_1p4b_finetune_config = finetune_recipe(
    PYTHIA_1P4B,
    what="Pythia 1.4B full fine-tuning",
    gpus=8,
    memory_gb=27,
    seq_length=2048,
    micro_batch_size=4,
    lr=1e-5,
)
seed_oss_36b_finetune_config = finetune_recipe(
    SEED_OSS_36B, layout(tp=8), what="Seed-OSS 36B full fine-tuning", gpus=16, memory_gb=64
)
stablelm2_1p6b_finetune_config = finetune_recipe(
    "stabilityai/stablelm-2-1_6b",
    what="StableLM 2 1.6B full fine-tuning",
    gpus=8,
    memory_gb=22,
    lr=1e-5,
)
starcoder2_7b_finetune_config = finetune_recipe(
    "bigcode/starcoder2-7b",
    layout(tp=2),
    what="StarCoder2 7B full fine-tuning",
    gpus=8,
    memory_gb=43,
)

# Models with experts of vendors with few families here. Learning rates are our own.
#
# dots.llm1 and MiniMax-M2 have 62 layers: the first and the last stage have one layer less than the others.

DOTS_LLM1_142B = "rednote-hilab/dots.llm1.base"
HUNYUAN_80B_A13B = "tencent/Hunyuan-A13B-Instruct"
K_EXAONE_236B = "LGAI-EXAONE/K-EXAONE-236B-A23B"
MINIMAX_M2_229B = "MiniMaxAI/MiniMax-M2"
MOE_7B_A1B = "ibm-research/moe-7b-1b-active-shared-experts"  # parts of its config are assumed: docs/models.md
PHI35_MOE_42B = "microsoft/Phi-3.5-MoE-instruct"
_LARGE: PretrainOptions = {"seq_length": 4096, "global_batch_size": 1024, "lr": 2e-4}
_4_STAGES: LayoutOptions = {"pipeline_layout": "Et*15|t*16|t*16|t*15L"}
_8_STAGES: LayoutOptions = {"pipeline_layout": "Et*7|(t*8|)*6t*7L"}

dots_llm1_142b_pretrain_config = pretrain_recipe(
    DOTS_LLM1_142B,
    _4_STAGES,
    _LARGE,
    layout(tp=4, pp=4, ep=8, etp=1),
    what="dots.llm1 142B-A14B pretraining",
    gpus=64,
    memory_gb=68,
)
ernie45_21b_a3b_pretrain_config = pretrain_recipe(
    "baidu/ERNIE-4.5-21B-A3B-PT",
    layout(ep=8),
    what="ERNIE 4.5 21B-A3B pretraining",
    gpus=16,
    memory_gb=59,
    seq_length=4096,
    lr=3e-4,
)
granite31_1b_a400m_pretrain_config = pretrain_recipe(
    "ibm-granite/granite-3.1-1b-a400m-base",
    what="Granite 3.1 1B-A400M pretraining",
    gpus=8,
    memory_gb=37,
    micro_batch_size=4,
    seq_length=4096,
    lr=5e-4,
)
granite_moe_shared_7b_a1b_pretrain_config = pretrain_recipe(
    MOE_7B_A1B,
    what="Granite MoE Shared 7B-A1B pretraining",
    gpus=8,
    memory_gb=69,
    micro_batch_size=2,
    recompute=["layernorm", "moe_act"],
    seq_length=4096,
    lr=5e-4,
)
hunyuan_80b_a13b_pretrain_config = pretrain_recipe(
    HUNYUAN_80B_A13B,
    _LARGE,
    layout(tp=2, pp=2, ep=8, etp=1),
    what="Hunyuan 80B-A13B pretraining",
    gpus=64,
    memory_gb=71,
)
k_exaone_236b_pretrain_config = pretrain_recipe(
    K_EXAONE_236B,
    _LARGE,
    layout(tp=4, pp=4, ep=16, etp=1),
    what="K-EXAONE 236B-A23B pretraining",
    gpus=128,
    memory_gb=63,
)
minimax_m2_229b_pretrain_config = pretrain_recipe(
    MINIMAX_M2_229B,
    _8_STAGES,
    _LARGE,
    layout(tp=2, pp=8, ep=8, etp=1),
    what="MiniMax-M2 229B-A10B pretraining",
    gpus=128,
    memory_gb=69,
)
phi35_moe_42b_pretrain_config = pretrain_recipe(
    PHI35_MOE_42B,
    _PRETRAIN,
    layout(tp=2, pp=2, ep=8, etp=1),
    what="Phi-3.5-MoE 42B-A7B pretraining",
    gpus=16,
    memory_gb=60,
)
solar_open_100b_pretrain_config = pretrain_recipe(
    "upstage/Solar-Open-100B",
    _LARGE,
    layout(tp=4, pp=2, ep=8, etp=1),
    what="Solar Open 100B pretraining",
    gpus=64,
    memory_gb=72,
)
trinity_mini_26b_pretrain_config = pretrain_recipe(
    "arcee-ai/Trinity-Mini",
    layout(ep=8),
    what="Trinity Mini 26B-A3B pretraining",
    gpus=32,
    memory_gb=65,
    seq_length=4096,
    lr=3e-4,
)

dots_llm1_142b_finetune_config = finetune_recipe(
    DOTS_LLM1_142B,
    _4_STAGES,
    layout(tp=4, pp=4, ep=8, etp=1),
    what="dots.llm1 142B-A14B full fine-tuning",
    gpus=64,
    memory_gb=68,
)
ernie45_21b_a3b_finetune_config = finetune_recipe(
    "baidu/ERNIE-4.5-21B-A3B-PT",
    layout(ep=8),
    what="ERNIE 4.5 21B-A3B full fine-tuning",
    gpus=16,
    memory_gb=59,
)
granite31_1b_a400m_finetune_config = finetune_recipe(
    "ibm-granite/granite-3.1-1b-a400m-base",
    what="Granite 3.1 1B-A400M full fine-tuning",
    gpus=8,
    memory_gb=17,
    lr=1e-5,
)
granite_moe_shared_7b_a1b_finetune_config = finetune_recipe(
    MOE_7B_A1B, what="Granite MoE Shared 7B-A1B full fine-tuning", gpus=8, memory_gb=60, lr=1e-5
)
hunyuan_80b_a13b_finetune_config = finetune_recipe(
    HUNYUAN_80B_A13B,
    layout(tp=2, pp=2, ep=8, etp=1),
    what="Hunyuan 80B-A13B full fine-tuning",
    gpus=64,
    memory_gb=71,
)
k_exaone_236b_finetune_config = finetune_recipe(
    K_EXAONE_236B,
    layout(tp=4, pp=4, ep=16, etp=1),
    what="K-EXAONE 236B-A23B full fine-tuning",
    gpus=128,
    memory_gb=63,
)
minimax_m2_229b_finetune_config = finetune_recipe(
    MINIMAX_M2_229B,
    _8_STAGES,
    layout(tp=2, pp=8, ep=8, etp=1),
    what="MiniMax-M2 229B-A10B full fine-tuning",
    gpus=128,
    memory_gb=69,
)
phi35_moe_42b_finetune_config = finetune_recipe(
    PHI35_MOE_42B,
    layout(tp=2, pp=2, ep=8, etp=1),
    what="Phi-3.5-MoE 42B-A7B full fine-tuning",
    gpus=16,
    memory_gb=60,
)
solar_open_100b_finetune_config = finetune_recipe(
    "upstage/Solar-Open-100B",
    layout(tp=4, pp=2, ep=8, etp=1),
    what="Solar Open 100B full fine-tuning",
    gpus=64,
    memory_gb=72,
)
trinity_mini_26b_finetune_config = finetune_recipe(
    "arcee-ai/Trinity-Mini",
    layout(tp=2, ep=8, etp=1),
    what="Trinity Mini 26B-A3B full fine-tuning",
    gpus=16,
    memory_gb=57,
)

# Models with mixers or short convolutions instead of attention, or parallel to it. Learning rates are our own.


bamba_9b_pretrain_config = pretrain_recipe(
    "ibm-fms/Bamba-9B", _PRETRAIN, layout(tp=2), what="Bamba 9B pretraining", gpus=16, memory_gb=52
)
codestral_mamba_7b_pretrain_config = pretrain_recipe(
    "mistralai/Mamba-Codestral-7B-v0.1",
    _PRETRAIN,
    layout(tp=2),
    what="Codestral Mamba 7B pretraining",
    gpus=16,
    memory_gb=44,
)
falcon_h1_500m_pretrain_config = pretrain_recipe(
    "tiiuae/Falcon-H1-0.5B-Base",
    _PRETRAIN,
    what="Falcon-H1 0.5B pretraining",
    gpus=8,
    memory_gb=30,
    micro_batch_size=4,
)
granite4_h_tiny_pretrain_config = pretrain_recipe(
    "ibm-granite/granite-4.0-h-tiny",
    _PRETRAIN,
    what="Granite 4 H-Tiny 7B-A1B pretraining",
    gpus=8,
    memory_gb=68,
)
jamba_52b_pretrain_config = pretrain_recipe(
    "ai21labs/Jamba-v0.1",
    _PRETRAIN,
    layout(tp=4, ep=8, etp=1),
    what="Jamba 52B-A12B pretraining",
    gpus=32,
    memory_gb=72,
)
lfm2_1p2b_pretrain_config = pretrain_recipe(
    "LiquidAI/LFM2-1.2B", _PRETRAIN, what="LFM2 1.2B pretraining", gpus=8, memory_gb=16
)
lfm2_8b_a1b_pretrain_config = pretrain_recipe(
    "LiquidAI/LFM2-8B-A1B",
    _PRETRAIN,
    layout(ep=2),
    what="LFM2 8B-A1B pretraining",
    gpus=8,
    memory_gb=50,
)

bamba_9b_finetune_config = finetune_recipe(
    "ibm-fms/Bamba-9B", layout(tp=2), what="Bamba 9B full fine-tuning", gpus=8, memory_gb=59
)
codestral_mamba_7b_finetune_config = finetune_recipe(
    "mistralai/Mamba-Codestral-7B-v0.1",
    layout(tp=2),
    what="Codestral Mamba 7B full fine-tuning",
    gpus=8,
    memory_gb=49,
)
falcon_h1_500m_finetune_config = finetune_recipe(
    "tiiuae/Falcon-H1-0.5B-Base",
    what="Falcon-H1 0.5B full fine-tuning",
    gpus=1,
    memory_gb=16,
    lr=3e-5,
)
granite4_h_tiny_finetune_config = finetune_recipe(
    "ibm-granite/granite-4.0-h-tiny",
    what="Granite 4 H-Tiny 7B-A1B full fine-tuning",
    gpus=8,
    memory_gb=68,
    lr=1e-5,
)
jamba_52b_finetune_config = finetune_recipe(
    "ai21labs/Jamba-v0.1",
    layout(tp=4, ep=8, etp=1),
    what="Jamba 52B-A12B full fine-tuning",
    gpus=32,
    memory_gb=72,
)
lfm2_1p2b_finetune_config = finetune_recipe(
    "LiquidAI/LFM2-1.2B", what="LFM2 1.2B full fine-tuning", gpus=8, memory_gb=16, lr=1e-5
)
lfm2_8b_a1b_finetune_config = finetune_recipe(
    "LiquidAI/LFM2-8B-A1B", layout(ep=2), what="LFM2 8B-A1B full fine-tuning", gpus=8, memory_gb=50
)
