# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5V: GLM-4.5 Air with a vision tower. The learning rate is our own."""

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.options import LayoutOptions, layout
from megatron.bridge.recipes.sizes import VisionSize

GLM_45V = VisionSize(
    "zai-org/GLM-4.5V",
    {
        "model_type": "glm4v_moe",
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "image_token_id": 151363,
        "video_token_id": 151364,
        "text_config": {
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "max_position_embeddings": 65536,
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": {"mrope_section": [8, 12, 12], "type": "default"},
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "pad_token_id": 151329,
            "eos_token_id": [151329, 151336, 151338],
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1536,
            "intermediate_size": 10944,
            "image_size": 336,
            "num_heads": 12,
            "out_hidden_size": 4096,
        },
    },
)
_STAGES: LayoutOptions = {"pipeline_layout": "Et*3|(t*4|)*10t*3L"}

glm_45v_finetune_config = finetune_recipe(GLM_45V, _STAGES, layout(tp=4, pp=4, vp=3, ep=8, etp=1))
"""GLM-4.5V 106B-A12B full fine-tuning, 64 x H100 80GB: 60 GB each, TP4 PP4 EP8."""
