# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2. Learning rates, and the batch size of V2-Lite, are from "DeepSeek-V2" (2024)."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import PretrainOptions, layout
from megatron.bridge.recipes.sizes import DENSE, Generation

DEEPSEEK_V2_GENERATION = Generation(
    {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 102400,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "norm_topk_prob": False,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "scoring_func": "softmax",
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attention_bias": False,
        "max_position_embeddings": 163840,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    columns=(*DENSE, "moe_intermediate_size", "n_routed_experts"),
)
DEEPSEEK_V2_LITE = DEEPSEEK_V2_GENERATION.size(
    *("deepseek-ai/DeepSeek-V2-Lite", 2048, 10944, 27, 16, 16, 1408, 64),
    q_lora_rank=None,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    routed_scaling_factor=1.0,
)
DEEPSEEK_V2 = DEEPSEEK_V2_GENERATION.size(
    *("deepseek-ai/DeepSeek-V2", 5120, 12288, 60, 128, 128, 1536, 160),
    q_lora_rank=1536,
    n_group=8,
    topk_group=3,
    topk_method="group_limited_greedy",
    routed_scaling_factor=16.0,
)
_PRETRAIN: PretrainOptions = {"seq_length": 4096, "global_batch_size": 4608}
_LAYOUT = layout(tp=8, pp=4, vp=5, ep=16, etp=1)

deepseek_v2_lite_pretrain_config = pretrain_recipe(DEEPSEEK_V2_LITE, _PRETRAIN, layout(ep=8), lr=4.2e-4, min_lr=4.2e-5)
"""DeepSeek-V2-Lite 16B pretraining, 8 x H100 80GB: 61 GB each, EP8."""
deepseek_v2_pretrain_config = pretrain_recipe(DEEPSEEK_V2, _PRETRAIN, _LAYOUT, lr=2.4e-4, min_lr=2.4e-5)
"""DeepSeek-V2 236B pretraining, 128 x H100 80GB: 60 GB each, TP8 PP4 EP16."""

deepseek_v2_lite_finetune_config = finetune_recipe(DEEPSEEK_V2_LITE, layout(ep=8))
"""DeepSeek-V2-Lite 16B full fine-tuning, 8 x H100 80GB: 61 GB each, EP8."""
deepseek_v2_finetune_config = finetune_recipe(DEEPSEEK_V2, _LAYOUT)
"""DeepSeek-V2 236B full fine-tuning, 128 x H100 80GB: 60 GB each, TP8 PP4 EP16."""
