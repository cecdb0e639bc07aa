# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5. The first and the last learning rate are from "GLM-4.5" (2025); the optimizer here is Adam.

Air has 12 interleaved stages of four layers, counting the embedding and the layer for multi-token prediction. The
large model has 32 stages for 92 layers: the first has two layers and the embedding, the last has one layer and the
layer for multi-token prediction, the stage before it has two layers, and all others have three.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import LayoutOptions, PretrainOptions, layout
from megatron.bridge.recipes.sizes import DENSE, Generation

GLM45 = Generation(
    {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "vocab_size": 151552,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "eos_token_id": [151329, 151336, 151338],
        "pad_token_id": 151329,
    },
    columns=(*DENSE, "moe_intermediate_size", "n_routed_experts", "first_k_dense_replace"),
)
GLM45_AIR_106B = GLM45.size(
    *("zai-org/GLM-4.5-Air", 4096, 10944, 46, 96, 8, 1408, 128, 1), use_qk_norm=False, routed_scaling_factor=1.0
)
GLM45_355B = GLM45.size(
    *("zai-org/GLM-4.5", 5120, 12288, 92, 96, 8, 1536, 160, 3), use_qk_norm=True, routed_scaling_factor=2.5
)
_AIR: LayoutOptions = {"pipeline_layout": "Et*3|(t*4|)*10t*3mL"}
_STAGES: LayoutOptions = {"pipeline_layout": "Et*2|(t*3|)*29t*2|tmL"}
_PRETRAIN: PretrainOptions = {"seq_length": 4096, "lr": 2.5e-4, "min_lr": 2.5e-5}

glm45_air_106b_pretrain_config = pretrain_recipe(
    GLM45_AIR_106B, _AIR, _PRETRAIN, layout(tp=4, pp=4, vp=3, ep=8, etp=1), global_batch_size=1024
)
"""GLM-4.5 Air 106B-A12B pretraining, 64 x H100 80GB: 58 GB each, TP4 PP4 EP8."""
glm45_355b_pretrain_config = pretrain_recipe(
    GLM45_355B, _STAGES, _PRETRAIN, layout(tp=8, pp=16, vp=2, ep=8, etp=1), global_batch_size=4096
)
"""GLM-4.5 355B-A32B pretraining, 256 x H100 80GB: 57 GB each, TP8 PP16 EP8."""

glm45_air_106b_finetune_config = finetune_recipe(GLM45_AIR_106B, _AIR, layout(tp=4, pp=4, vp=3, ep=8, etp=1))
"""GLM-4.5 Air 106B-A12B full fine-tuning, 64 x H100 80GB: 58 GB each, TP4 PP4 EP8."""
glm45_355b_finetune_config = finetune_recipe(
    GLM45_355B, _STAGES, layout(tp=8, pp=8, vp=4, ep=16, etp=1), recompute=["layernorm", "moe_act"]
)
"""GLM-4.5 355B-A32B full fine-tuning, 128 x H100 80GB: 69 GB each, TP8 PP8 EP16."""
