# SPDX-License-Identifier: Apache-2.0
"""gpt-oss. Learning rates are our own: none are published.

Transformers does not apply the published coefficient of the load-balancing loss, 0.9 (``output_router_logits`` is
off). It would outweigh the language-model loss, so the recipes use 0.001.
"""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import Generation

GPT_OSS = Generation(
    {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
    },
    columns=("num_hidden_layers", "num_local_experts"),
    training={"moe_aux_loss_coeff": 0.001},
)
GPT_OSS_20B = GPT_OSS.size("openai/gpt-oss-20b", 24, 32)
GPT_OSS_120B = GPT_OSS.size("openai/gpt-oss-120b", 36, 128)

gpt_oss_20b_pretrain_config = pretrain_recipe(GPT_OSS_20B, layout(tp=2, ep=4, etp=1), seq_length=4096, lr=3e-4)
"""gpt-oss 20B pretraining, 16 x H100 80GB: 65 GB each, TP2 EP4."""
gpt_oss_120b_pretrain_config = pretrain_recipe(
    GPT_OSS_120B, layout(tp=2, pp=4, vp=3, ep=8, etp=1), seq_length=4096, lr=2e-4
)
"""gpt-oss 120B pretraining, 64 x H100 80GB: 71 GB each, TP2 PP4 EP8."""

gpt_oss_20b_finetune_config = finetune_recipe(GPT_OSS_20B, layout(tp=2, ep=8, etp=1))
"""gpt-oss 20B full fine-tuning, 8 x H100 80GB: 66 GB each, TP2 EP8."""
gpt_oss_120b_finetune_config = finetune_recipe(GPT_OSS_120B, layout(tp=2, pp=4, vp=3, ep=8, etp=1))
"""gpt-oss 120B full fine-tuning, 64 x H100 80GB: 71 GB each, TP2 PP4 EP8."""
