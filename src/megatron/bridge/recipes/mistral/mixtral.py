# SPDX-License-Identifier: Apache-2.0
"""Mixtral. Learning rates are our own: none are published."""

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import Generation

MIXTRAL = Generation(
    {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "max_position_embeddings": 65536,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
MIXTRAL_8X7B = MIXTRAL.size(
    *("mistralai/Mixtral-8x7B-v0.1", 4096, 14336, 32, 32, 8), max_position_embeddings=32768, router_aux_loss_coef=0.02
)
MIXTRAL_8X22B = MIXTRAL.size("mistralai/Mixtral-8x22B-v0.1", 6144, 16384, 56, 48, 8)

mixtral_8x7b_pretrain_config = pretrain_recipe(
    MIXTRAL_8X7B, layout(tp=2, pp=4, vp=4, ep=4, etp=1), seq_length=4096, lr=3e-4
)
"""Mixtral 8x7B pretraining, 32 x H100 80GB: 57 GB each, TP2 PP4 EP4."""
mixtral_8x22b_pretrain_config = pretrain_recipe(
    MIXTRAL_8X22B, layout(tp=4, pp=4, vp=7, ep=8, etp=1), seq_length=4096, lr=2e-4
)
"""Mixtral 8x22B pretraining, 128 x H100 80GB: 63 GB each, TP4 PP4 EP8."""

mixtral_8x7b_finetune_config = finetune_recipe(MIXTRAL_8X7B, layout(tp=2, pp=4, vp=4, ep=4, etp=1))
"""Mixtral 8x7B full fine-tuning, 32 x H100 80GB: 57 GB each, TP2 PP4 EP4."""
mixtral_8x22b_finetune_config = finetune_recipe(MIXTRAL_8X22B, layout(tp=8, pp=4, vp=7, ep=8, etp=1))
"""Mixtral 8x22B full fine-tuning, 64 x H100 80GB: 64 GB each, TP8 PP4 EP8."""
