# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: gated delta nets and attention, with many small experts. Learning rates are our own."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import DENSE, Generation

QWEN3_NEXT = Generation(
    {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 151936,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "attention_bias": False,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "max_position_embeddings": 262144,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    columns=(*DENSE, "num_experts"),
)
QWEN3_NEXT_80B_A3B = QWEN3_NEXT.size("Qwen/Qwen3-Next-80B-A3B-Instruct", 2048, 5120, 48, 16, 2, 512)

qwen3_next_80b_a3b_pretrain_config = pretrain_recipe(
    QWEN3_NEXT_80B_A3B, layout(tp=2, pp=2, ep=8, etp=1), seq_length=4096, global_batch_size=1024, lr=3e-4
)
"""Qwen 3 Next 80B-A3B pretraining, 64 x H100 80GB: 67 GB each, TP2 PP2 EP8."""

qwen3_next_80b_a3b_finetune_config = finetune_recipe(QWEN3_NEXT_80B_A3B, layout(tp=2, pp=2, ep=8, etp=1))
"""Qwen 3 Next 80B-A3B full fine-tuning, 64 x H100 80GB: 67 GB each, TP2 PP2 EP8."""
