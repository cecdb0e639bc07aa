# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Nemotron family."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import LayoutOptions, PretrainOptions, layout
from megatron.bridge.recipes.sizes import size_of

# Llama-Nemotron: Llama 3, pruned by a search, so that its layers differ. Learning rates are our own.

LLAMA_NEMOTRON_8B = "nvidia/Llama-3.1-Nemotron-Nano-8B-v1"
LLAMA_NEMOTRON_49B = "nvidia/Llama-3_3-Nemotron-Super-49B-v1"
LLAMA_NEMOTRON_253B = "nvidia/Llama-3_1-Nemotron-Ultra-253B-v1"

llama_nemotron_8b_pretrain_config = pretrain_recipe(
    LLAMA_NEMOTRON_8B,
    layout(tp=2),
    what="Llama-Nemotron 8B pretraining",
    gpus=8,
    memory_gb=58,
    seq_length=8192,
    lr=3e-4,
)
llama_nemotron_49b_pretrain_config = pretrain_recipe(
    LLAMA_NEMOTRON_49B,
    layout(tp=8),
    what="Llama-Nemotron 49B pretraining",
    gpus=64,
    memory_gb=65,
    seq_length=8192,
    lr=2e-4,
)
llama_nemotron_253b_pretrain_config = pretrain_recipe(
    LLAMA_NEMOTRON_253B,
    layout(tp=8, pp=6, cp=2),
    what="Llama-Nemotron 253B pretraining",
    gpus=384,
    memory_gb=61,
    seq_length=8192,
    global_batch_size=768,
    lr=8e-5,
    min_lr=8e-7,
)

llama_nemotron_8b_finetune_config = finetune_recipe(
    LLAMA_NEMOTRON_8B, layout(tp=2), what="Llama-Nemotron 8B full fine-tuning", gpus=8, memory_gb=48
)
llama_nemotron_49b_finetune_config = finetune_recipe(
    LLAMA_NEMOTRON_49B,
    layout(tp=8),
    what="Llama-Nemotron 49B full fine-tuning",
    gpus=32,
    memory_gb=66,
)
llama_nemotron_253b_finetune_config = finetune_recipe(
    LLAMA_NEMOTRON_253B,
    layout(tp=8, pp=9),
    what="Llama-Nemotron 253B full fine-tuning",
    gpus=144,
    memory_gb=68,
    global_batch_size=192,
)

# Nemotron-4, and the Minitrons that were pruned from it.
#
# Learning rate and batch size of 15B are from "Nemotron-4 15B Technical Report" (2024), the batch size of 340B is
# from "Nemotron-4 340B Technical Report" (2024), and the other rates are our own. 15B is not on the hub: its sizes
# are from the report, and its tokenizer is from the Minitron that was pruned from it.

NEMOTRON4_15B = size_of("nvidia/Minitron-8B-Base", hidden_size=6144, intermediate_size=24576)
NEMOTRON4_340B = "nvidia/Nemotron-4-340B-Base"

nemotron4_15b_pretrain_config = pretrain_recipe(
    NEMOTRON4_15B,
    layout(tp=2),
    what="Nemotron-4 15B pretraining",
    gpus=32,
    memory_gb=70,
    seq_length=4096,
    global_batch_size=1152,
    lr=4.5e-4,
    min_lr=4.5e-7,
)
nemotron4_340b_pretrain_config = pretrain_recipe(
    NEMOTRON4_340B,
    layout(tp=8, pp=12, vp=8),
    what="Nemotron-4 340B pretraining",
    gpus=768,
    memory_gb=66,
    seq_length=4096,
    global_batch_size=2304,
    lr=1e-4,
    min_lr=1e-6,
)
minitron_4b_pretrain_config = pretrain_recipe(
    "nvidia/Minitron-4B-Base",
    what="Minitron 4B pretraining",
    gpus=8,
    memory_gb=49,
    seq_length=4096,
    lr=3e-4,
)
minitron_8b_pretrain_config = pretrain_recipe(
    "nvidia/Minitron-8B-Base",
    layout(tp=2),
    what="Minitron 8B pretraining",
    gpus=8,
    memory_gb=50,
    seq_length=4096,
    lr=3e-4,
)

nemotron4_15b_finetune_config = finetune_recipe(
    NEMOTRON4_15B, layout(tp=4), what="Nemotron-4 15B full fine-tuning", gpus=16, memory_gb=44
)
nemotron4_340b_finetune_config = finetune_recipe(
    NEMOTRON4_340B,
    layout(tp=8, pp=8, vp=6, cp=2),
    what="Nemotron-4 340B full fine-tuning",
    gpus=256,
    memory_gb=71,
)
minitron_4b_finetune_config = finetune_recipe(
    "nvidia/Minitron-4B-Base", what="Minitron 4B full fine-tuning", gpus=8, memory_gb=49, lr=1e-5
)
minitron_8b_finetune_config = finetune_recipe(
    "nvidia/Minitron-8B-Base",
    layout(tp=2),
    what="Minitron 8B full fine-tuning",
    gpus=8,
    memory_gb=50,
)

# Nemotron-H: Mamba-2 layers (M) and feed-forward layers (-) with a few attention layers (*).
#
# Learning rates and batch sizes of 8B and 56B, from which 4B and 47B were pruned, are from "Nemotron-H" (2025).

NEMOTRONH_8B = "nvidia/Nemotron-H-8B-Base-8K"
NEMOTRONH_47B = "nvidia/Nemotron-H-47B-Base-8K"
NEMOTRONH_56B = "nvidia/Nemotron-H-56B-Base-8K"
_H_PRETRAIN: PretrainOptions = {"seq_length": 8192, "global_batch_size": 768}

nemotronh_4b_pretrain_config = pretrain_recipe(
    "nvidia/Nemotron-H-4B-Base-8K",
    _H_PRETRAIN,
    what="Nemotron-H 4B pretraining",
    gpus=8,
    memory_gb=69,
    lr=8e-4,
    min_lr=8e-6,
)
nemotronh_8b_pretrain_config = pretrain_recipe(
    NEMOTRONH_8B,
    _H_PRETRAIN,
    layout(tp=2),
    what="Nemotron-H 8B pretraining",
    gpus=16,
    memory_gb=55,
    lr=8e-4,
    min_lr=8e-6,
)
nemotronh_47b_pretrain_config = pretrain_recipe(
    NEMOTRONH_47B,
    _H_PRETRAIN,
    layout(tp=8),
    what="Nemotron-H 47B pretraining",
    gpus=64,
    memory_gb=63,
    lr=4e-4,
    min_lr=4e-6,
)
nemotronh_56b_pretrain_config = pretrain_recipe(
    NEMOTRONH_56B,
    _H_PRETRAIN,
    layout(tp=8, pp=2),
    what="Nemotron-H 56B pretraining",
    gpus=64,
    memory_gb=55,
    lr=4e-4,
    min_lr=4e-6,
)

nemotronh_4b_finetune_config = finetune_recipe(
    "nvidia/Nemotron-H-4B-Base-8K",
    what="Nemotron-H 4B full fine-tuning",
    gpus=8,
    memory_gb=52,
    lr=1e-5,
)
nemotronh_8b_finetune_config = finetune_recipe(
    NEMOTRONH_8B, layout(tp=2), what="Nemotron-H 8B full fine-tuning", gpus=8, memory_gb=49
)
nemotronh_47b_finetune_config = finetune_recipe(
    NEMOTRONH_47B, layout(tp=8), what="Nemotron-H 47B full fine-tuning", gpus=32, memory_gb=62
)
nemotronh_56b_finetune_config = finetune_recipe(
    NEMOTRONH_56B, layout(tp=8, pp=2), what="Nemotron-H 56B full fine-tuning", gpus=32, memory_gb=54
)

# Nemotron Nano: version 2, which is dense, and version 3, with experts (E) instead of feed-forward layers; in Super,
# experts process projections of the hidden states.
#
# The learning rate of 12B v2, from which 9B was pruned, is from "NVIDIA Nemotron Nano 2" (2025); the others are our
# own.

NEMOTRON_3_NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
NEMOTRON_3_SUPER = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"
_SUPER: LayoutOptions = {"recompute": ["layernorm", "moe_act"]}
_NANO_PRETRAIN: PretrainOptions = {
    "seq_length": 8192,
    "global_batch_size": 768,
    "lr": 4.5e-4,
    "min_lr": 4.5e-6,
}

nemotron_nano_9b_v2_pretrain_config = pretrain_recipe(
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    _NANO_PRETRAIN,
    layout(tp=2),
    what="Nemotron Nano 9B v2 pretraining",
    gpus=16,
    memory_gb=59,
)
nemotron_nano_12b_v2_pretrain_config = pretrain_recipe(
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2",
    _NANO_PRETRAIN,
    layout(tp=4),
    what="Nemotron Nano 12B v2 pretraining",
    gpus=16,
    memory_gb=43,
)
nemotron_3_nano_pretrain_config = pretrain_recipe(
    NEMOTRON_3_NANO,
    layout(tp=2, ep=8, etp=1),
    what="Nemotron 3 Nano 30B-A3B pretraining",
    gpus=32,
    memory_gb=61,
    seq_length=8192,
    global_batch_size=768,
    lr=3e-4,
)
nemotron_3_super_pretrain_config = pretrain_recipe(
    NEMOTRON_3_SUPER,
    _SUPER,
    layout(tp=4, pp=4, ep=8, etp=1),
    what="Nemotron 3 Super 120B-A12B pretraining",
    gpus=128,
    memory_gb=65,
    seq_length=8192,
    global_batch_size=768,
    lr=3e-4,
)

nemotron_nano_9b_v2_finetune_config = finetune_recipe(
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    layout(tp=2),
    what="Nemotron Nano 9B v2 full fine-tuning",
    gpus=8,
    memory_gb=53,
)
nemotron_nano_12b_v2_finetune_config = finetune_recipe(
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2",
    layout(tp=2),
    what="Nemotron Nano 12B v2 full fine-tuning",
    gpus=8,
    memory_gb=72,
)
nemotron_3_nano_finetune_config = finetune_recipe(
    NEMOTRON_3_NANO,
    layout(tp=2, ep=8, etp=1),
    what="Nemotron 3 Nano 30B-A3B full fine-tuning",
    gpus=16,
    memory_gb=63,
)
nemotron_3_super_finetune_config = finetune_recipe(
    NEMOTRON_3_SUPER,
    _SUPER,
    layout(tp=4, pp=4, ep=8, etp=1),
    what="Nemotron 3 Super 120B-A12B full fine-tuning",
    gpus=64,
    memory_gb=63,
)

# Nemotron Nano VL v2. Learning rates and the batch size of pretraining are Megatron Bridge's.
#
# The published config could not be read (docs/vision.md lists the unknown numbers): pass the model as ``hf_model`` to
# train the model from the hub. The memory is for samples that consist of images, which are distributed evenly over
# tensor-parallel ranks.

NEMOTRON_NANO_VL = "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16"

nemotron_nano_v2_vl_12b_pretrain_config = pretrain_recipe(
    NEMOTRON_NANO_VL,
    layout(tp=4),
    what="Nemotron Nano v2 VL 12B pretraining",
    gpus=8,
    memory_gb=61,
    seq_length=4096,
    global_batch_size=32,
    lr=3e-4,
    min_lr=3e-5,
)
nemotron_nano_v2_vl_12b_finetune_config = finetune_recipe(
    NEMOTRON_NANO_VL,
    layout(tp=4),
    what="Nemotron Nano v2 VL 12B full fine-tuning",
    gpus=8,
    memory_gb=61,
    lr=1e-5,
    min_lr=1e-6,
)
