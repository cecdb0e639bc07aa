# SPDX-License-Identifier: Apache-2.0
"""OLMoE. Learning rates and batch size are from "OLMoE: Open Mixture-of-Experts Language Models" (2024)."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.sizes import Generation

OLMOE = Generation(
    {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "vocab_size": 50304,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
        "clip_qkv": None,
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 50279,
        "pad_token_id": 1,
    }
)
OLMOE_7B = OLMOE.size("allenai/OLMoE-1B-7B-0924", 2048, 1024, 16, 16, 16)

olmoe_7b_pretrain_config = pretrain_recipe(OLMOE_7B, seq_length=4096, global_batch_size=1024, lr=4e-4, min_lr=4e-5)
"""OLMoE 7B pretraining, 8 x H100 80GB: 62 GB each, no model parallelism."""

olmoe_7b_finetune_config = finetune_recipe(OLMOE_7B)
"""OLMoE 7B full fine-tuning, 8 x H100 80GB: 62 GB each, no model parallelism."""
