# SPDX-License-Identifier: Apache-2.0
"""GLM-4 (0414). Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import Generation

GLM4 = Generation(
    {
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        "vocab_size": 151552,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": [151329, 151336, 151338],
        "pad_token_id": 151329,
    }
)
GLM4_9B = GLM4.size("zai-org/GLM-4-9B-0414", 4096, 13696, 40, 32, 2, attention_bias=True)
GLM4_32B = GLM4.size("zai-org/GLM-4-32B-0414", 6144, 23040, 61, 48, 2, attention_bias=False)

glm4_9b_pretrain_config = pretrain_recipe(GLM4_9B, layout(tp=2), seq_length=8192, lr=3e-4)
"""GLM-4 9B pretraining, 16 x H100 80GB: 64 GB each, TP2."""
glm4_32b_pretrain_config = pretrain_recipe(GLM4_32B, layout(tp=8), seq_length=8192, lr=2e-4)
"""GLM-4 32B pretraining, 32 x H100 80GB: 56 GB each, TP8."""

glm4_9b_finetune_config = finetune_recipe(GLM4_9B, layout(tp=2))
"""GLM-4 9B full fine-tuning, 8 x H100 80GB: 57 GB each, TP2."""
glm4_32b_finetune_config = finetune_recipe(GLM4_32B, layout(tp=8))
"""GLM-4 32B full fine-tuning, 16 x H100 80GB: 59 GB each, TP8."""
