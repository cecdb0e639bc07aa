# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H: Mamba-2 layers (M) and feed-forward layers (-) with a few attention layers (*).

Learning rates and batch sizes of 8B and 56B, from which 4B and 47B were pruned, are from "Nemotron-H" (2025).
"""

from typing import Any

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import PretrainOptions, layout
from megatron.bridge.recipes.sizes import DENSE, Generation

NEMOTRON_H_COMMON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "expand": 2,
    "use_conv_bias": True,
    "use_bias": False,
    "hidden_dropout": 0.0,
    "residual_in_fp32": False,
    "rescale_prenorm_residual": True,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NEMOTRONH = Generation({**NEMOTRON_H_COMMON, "attention_head_dim": 128}, columns=(*DENSE, "mamba_num_heads"))
NEMOTRONH_4B = NEMOTRONH.size(
    *("nvidia/Nemotron-H-4B-Base-8K", 3072, 12288, 52, 32, 8, 112),
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
)
NEMOTRONH_8B = NEMOTRONH.size(
    *("nvidia/Nemotron-H-8B-Base-8K", 4096, 21504, 52, 32, 8, 128),
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
)
NEMOTRONH_47B = NEMOTRONH.size(
    *("nvidia/Nemotron-H-47B-Base-8K", 8192, 30720, 98, 64, 8, 256),
    ssm_state_size=256,
    hybrid_override_pattern="M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*"
    "-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
)
NEMOTRONH_56B = NEMOTRONH.size(
    *("nvidia/Nemotron-H-56B-Base-8K", 8192, 32768, 118, 64, 8, 256),
    ssm_state_size=256,
    hybrid_override_pattern="M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
)
_PRETRAIN: PretrainOptions = {"seq_length": 8192, "global_batch_size": 768}

nemotronh_4b_pretrain_config = pretrain_recipe(NEMOTRONH_4B, _PRETRAIN, lr=8e-4, min_lr=8e-6)
"""Nemotron-H 4B pretraining, 8 x H100 80GB: 69 GB each, no model parallelism."""
nemotronh_8b_pretrain_config = pretrain_recipe(NEMOTRONH_8B, _PRETRAIN, layout(tp=2), lr=8e-4, min_lr=8e-6)
"""Nemotron-H 8B pretraining, 16 x H100 80GB: 55 GB each, TP2."""
nemotronh_47b_pretrain_config = pretrain_recipe(NEMOTRONH_47B, _PRETRAIN, layout(tp=8), lr=4e-4, min_lr=4e-6)
"""Nemotron-H 47B pretraining, 64 x H100 80GB: 62 GB each, TP8."""
nemotronh_56b_pretrain_config = pretrain_recipe(NEMOTRONH_56B, _PRETRAIN, layout(tp=8, pp=2), lr=4e-4, min_lr=4e-6)
"""Nemotron-H 56B pretraining, 64 x H100 80GB: 54 GB each, TP8 PP2."""

nemotronh_4b_finetune_config = finetune_recipe(NEMOTRONH_4B, lr=1e-5)
"""Nemotron-H 4B full fine-tuning, 8 x H100 80GB: 52 GB each, no model parallelism."""
nemotronh_8b_finetune_config = finetune_recipe(NEMOTRONH_8B, layout(tp=2))
"""Nemotron-H 8B full fine-tuning, 8 x H100 80GB: 49 GB each, TP2."""
nemotronh_47b_finetune_config = finetune_recipe(NEMOTRONH_47B, layout(tp=8))
"""Nemotron-H 47B full fine-tuning, 32 x H100 80GB: 62 GB each, TP8."""
nemotronh_56b_finetune_config = finetune_recipe(NEMOTRONH_56B, layout(tp=8, pp=2))
"""Nemotron-H 56B full fine-tuning, 32 x H100 80GB: 54 GB each, TP8 PP2."""
