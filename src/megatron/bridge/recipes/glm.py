# SPDX-License-Identifier: Apache-2.0
"""Recipes of the GLM family."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import LayoutOptions, PretrainOptions, layout

# GLM-4 of 2024 and of April 2025 (0414). Learning rates are our own: none are published.

glm4_9b_pretrain_config = pretrain_recipe(
    "zai-org/GLM-4-9B-0414",
    layout(tp=2),
    what="GLM-4 9B pretraining",
    gpus=16,
    memory_gb=64,
    seq_length=8192,
    lr=3e-4,
)
glm4_9b_chat_pretrain_config = pretrain_recipe(
    "zai-org/glm-4-9b-chat-hf",
    layout(tp=2),
    what="GLM-4 9B Chat (2024) pretraining",
    gpus=16,
    memory_gb=62,
    seq_length=8192,
    lr=3e-4,
)
glm4_32b_pretrain_config = pretrain_recipe(
    "zai-org/GLM-4-32B-0414",
    layout(tp=2, cp=2, pp=8),
    what="GLM-4 32B pretraining",
    gpus=32,
    memory_gb=64,
    pipeline_layout="E(tttttttt|)*7tttttL",
    seq_length=8192,
    lr=2e-4,
)

glm4_9b_finetune_config = finetune_recipe(
    "zai-org/GLM-4-9B-0414", layout(tp=2), what="GLM-4 9B full fine-tuning", gpus=8, memory_gb=57
)
glm4_9b_chat_finetune_config = finetune_recipe(
    "zai-org/glm-4-9b-chat-hf",
    layout(tp=2),
    what="GLM-4 9B Chat (2024) full fine-tuning",
    gpus=8,
    memory_gb=56,
)
glm4_32b_finetune_config = finetune_recipe(
    "zai-org/GLM-4-32B-0414", layout(tp=8), what="GLM-4 32B full fine-tuning", gpus=16, memory_gb=59
)

# GLM-4.5 has the first and the last learning rate of "GLM-4.5" (2025), but Adam; 4.7-Flash and GLM-5 have our rates.
#
# Air has 12 interleaved stages of four layers, counting the embedding and the layer for multi-token prediction. The
# large model has 32 stages for 92 layers: the first has two layers and the embedding, the last has one layer and the
# layer for multi-token prediction, the stage before it has two layers, and all others have three. GLM-5 has 16 for 78
# layers: four in the first and in the last, and five in the others.

GLM47_FLASH_30B = "zai-org/GLM-4.7-Flash"
_AIR: LayoutOptions = {"pipeline_layout": "Et*3|(t*4|)*10t*3mL"}
_LARGE_STAGES: LayoutOptions = {"pipeline_layout": "Et*2|(t*3|)*29t*2|tmL"}
_GLM5: LayoutOptions = {
    "pipeline_layout": "Et*4|(t*5|)*14t*4mL",
    "recompute": ["mla_up_proj", "layernorm", "moe_act", "shared_experts"],
}
_PRETRAIN: PretrainOptions = {"seq_length": 4096, "lr": 2.5e-4, "min_lr": 2.5e-5}

glm45_air_106b_pretrain_config = pretrain_recipe(
    "zai-org/GLM-4.5-Air",
    _AIR,
    _PRETRAIN,
    layout(tp=4, pp=4, vp=3, ep=8, etp=1),
    what="GLM-4.5 Air 106B-A12B pretraining",
    gpus=64,
    memory_gb=58,
    global_batch_size=1024,
)
glm45_355b_pretrain_config = pretrain_recipe(
    "zai-org/GLM-4.5",
    _LARGE_STAGES,
    _PRETRAIN,
    layout(tp=8, pp=16, vp=2, ep=8, etp=1),
    what="GLM-4.5 355B-A32B pretraining",
    gpus=256,
    memory_gb=58,
    global_batch_size=4096,
)
glm47_flash_30b_pretrain_config = pretrain_recipe(
    GLM47_FLASH_30B,
    layout(tp=2, ep=8, etp=1),
    what="GLM-4.7-Flash 30B-A3B pretraining",
    gpus=32,
    memory_gb=55,
    seq_length=4096,
    lr=3e-4,
)
glm5_744b_pretrain_config = pretrain_recipe(
    "zai-org/GLM-5",
    _GLM5,
    layout(tp=8, pp=16, ep=16, etp=1),
    what="GLM-5 744B-A40B pretraining",
    gpus=256,
    memory_gb=72,
    seq_length=4096,
    global_batch_size=4096,
    lr=2e-4,
)

glm45_air_106b_finetune_config = finetune_recipe(
    "zai-org/GLM-4.5-Air",
    _AIR,
    layout(tp=4, pp=4, vp=3, ep=8, etp=1),
    what="GLM-4.5 Air 106B-A12B full fine-tuning",
    gpus=64,
    memory_gb=58,
)
glm45_355b_finetune_config = finetune_recipe(
    "zai-org/GLM-4.5",
    _LARGE_STAGES,
    layout(tp=8, pp=8, vp=4, ep=16, etp=1),
    what="GLM-4.5 355B-A32B full fine-tuning",
    gpus=128,
    memory_gb=69,
    recompute=["layernorm", "moe_act"],
)
glm47_flash_30b_finetune_config = finetune_recipe(
    GLM47_FLASH_30B,
    layout(tp=2, ep=8, etp=1),
    what="GLM-4.7-Flash 30B-A3B full fine-tuning",
    gpus=16,
    memory_gb=67,
)
glm5_744b_finetune_config = finetune_recipe(
    "zai-org/GLM-5",
    _GLM5,
    layout(tp=8, pp=16, ep=16, etp=1),
    what="GLM-5 744B-A40B full fine-tuning",
    gpus=256,
    memory_gb=72,
)

# GLM-4.5V: GLM-4.5 Air with a vision tower. The learning rate is our own.
#
# The memory is for samples that consist of images, which are distributed evenly over tensor-parallel ranks.

_V_STAGES: LayoutOptions = {"pipeline_layout": "Et*3|(t*4|)*10t*3L"}

glm_45v_finetune_config = finetune_recipe(
    "zai-org/GLM-4.5V",
    _V_STAGES,
    layout(tp=4, pp=4, vp=3, ep=8, etp=1),
    what="GLM-4.5V 106B-A12B full fine-tuning",
    gpus=64,
    memory_gb=64,
    recompute=["vision_model"],
)
