# SPDX-License-Identifier: Apache-2.0
"""Moonlight. The learning rate is from "Muon is Scalable for LLM Training" (2025); the optimizer here is Adam."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import DENSE, Generation

MOONLIGHT = Generation(
    {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 163840,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.446,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "scoring_func": "sigmoid",
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
    },
    columns=(*DENSE, "moe_intermediate_size", "n_routed_experts"),
)
MOONLIGHT_16B = MOONLIGHT.size("moonshotai/Moonlight-16B-A3B", 2048, 11264, 27, 16, 16, 1408, 64)

moonlight_16b_pretrain_config = pretrain_recipe(MOONLIGHT_16B, layout(ep=4), seq_length=4096, lr=4.2e-4, min_lr=4.2e-5)
"""Moonlight 16B-A3B pretraining, 16 x H100 80GB: 62 GB each, EP4."""

moonlight_16b_finetune_config = finetune_recipe(MOONLIGHT_16B, layout(tp=2, ep=4, etp=1))
"""Moonlight 16B-A3B full fine-tuning, 8 x H100 80GB: 60 GB each, TP2 EP4."""
