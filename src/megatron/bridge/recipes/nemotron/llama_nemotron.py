# SPDX-License-Identifier: Apache-2.0
"""Llama-Nemotron: Llama 3, pruned by a search, so that its layers differ. Learning rates are our own.

Each row of ``LAYERS`` is a number of consecutive layers, whether they have attention, and the width of their
feed-forward layer as a multiple of the hidden size (None without one).
"""

from typing import Any

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import Generation, llama3_128k

# fmt: off
LAYERS_49B: list[tuple[int, bool, float | None]] = [
    (1, True, 2.625), (5, True, 5.25), (2, False, 2.625), (3, True, 5.25), (1, False, 3.28125),
    (30, True, 5.25), (1, False, 1.3125), (2, False, 2.625), (1, False, 1.3125), (1, False, 5.25),
    (1, False, 1.3125), (1, False, 2.625), (3, False, 1.3125), (1, True, 5.25), (1, False, 1.3125),
    (2, False, 1.0), (1, False, 1.3125), (3, False, 1.0), (2, False, 1.3125), (2, False, 0.5), (2, False, 1.0),
    (2, False, 0.5), (1, False, 1.0), (2, False, 0.5), (9, True, 5.25),
]
LAYERS_253B: list[tuple[int, bool, float | None]] = [
    (1, True, 0.4875), (1, True, 0.975), (6, True, 1.4625), (1, True, 1.95), (4, False, None), (3, True, 1.95),
    (2, True, 4.875), (6, False, None), (3, True, 4.875), (5, False, None), (3, True, 4.875),
    (1, True, 2.4375), (3, False, None), (3, True, 1.95), (1, False, 1.95), (1, True, 4.875),
    (1, False, 4.875), (5, False, None), (4, True, 4.875), (5, False, None), (4, True, 4.875),
    (5, False, None), (4, True, 4.875), (5, False, None), (4, True, 4.875), (5, False, None), (1, True, 4.875),
    (3, True, 3.4125), (2, False, None), (1, True, 2.925), (3, True, 2.4375), (2, False, 2.4375),
    (1, True, 2.4375), (1, False, None), (7, False, 2.4375), (1, True, 2.4375), (5, False, None),
    (1, True, 2.925), (1, True, 4.875), (1, False, 4.875), (1, True, 4.875), (8, False, None),
    (1, False, 36.5625), (8, False, None), (1, False, 39.0), (8, False, None), (1, False, 31.40625),
    (5, False, None), (1, False, 27.5625), (1, False, 1.95), (1, True, 1.95), (1, True, 2.4375),
    (1, False, None), (2, True, 2.4375), (1, True, 3.4125), (4, True, 4.875), (1, True, 2.4375),
]
# fmt: on


def _blocks(layers: list[tuple[int, bool, float | None]], heads_per_group: int) -> list[dict[str, Any]]:
    """``block_configs`` with one entry per layer."""
    return [
        {
            "attention": {"n_heads_in_group": heads_per_group if attends else None, "no_op": not attends},
            "ffn": {"ffn_mult": multiple, "no_op": multiple is None},
        }
        for count, attends, multiple in layers
        for _ in range(count)
    ]


_COMMON: dict[str, Any] = {
    "vocab_size": 128256,
    **llama3_128k(8.0),
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
NEMOTRON_NAS = Generation(
    {**_COMMON, "model_type": "nemotron-nas", "architectures": ["DeciLMForCausalLM"], "hidden_act": "silu"},
    columns=("hidden_size", "num_hidden_layers", "num_attention_heads"),
)
LLAMA_NEMOTRON_8B = Generation({**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}).size(
    "nvidia/Llama-3.1-Nemotron-Nano-8B-v1", 4096, 14336, 32, 32, 8
)
LLAMA_NEMOTRON_49B = NEMOTRON_NAS.size(
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1", 8192, 80, 64, block_configs=_blocks(LAYERS_49B, 8)
)
LLAMA_NEMOTRON_253B = NEMOTRON_NAS.size(
    *("nvidia/Llama-3_1-Nemotron-Ultra-253B-v1", 16384, 162, 128),
    block_configs=_blocks(LAYERS_253B, 16),
    **llama3_128k(16.0),
)

llama_nemotron_8b_pretrain_config = pretrain_recipe(LLAMA_NEMOTRON_8B, layout(tp=2), seq_length=8192, lr=3e-4)
"""Llama-Nemotron 8B pretraining, 8 x H100 80GB: 58 GB each, TP2."""
llama_nemotron_49b_pretrain_config = pretrain_recipe(LLAMA_NEMOTRON_49B, layout(tp=8), seq_length=8192, lr=2e-4)
"""Llama-Nemotron 49B pretraining, 64 x H100 80GB: 65 GB each, TP8."""
llama_nemotron_253b_pretrain_config = pretrain_recipe(
    LLAMA_NEMOTRON_253B, layout(tp=8, pp=6, cp=2), seq_length=8192, global_batch_size=768, lr=8e-5, min_lr=8e-7
)
"""Llama-Nemotron 253B pretraining, 384 x H100 80GB: 64 GB each, TP8 PP6 CP2."""

llama_nemotron_8b_finetune_config = finetune_recipe(LLAMA_NEMOTRON_8B, layout(tp=2))
"""Llama-Nemotron 8B full fine-tuning, 8 x H100 80GB: 48 GB each, TP2."""
llama_nemotron_49b_finetune_config = finetune_recipe(LLAMA_NEMOTRON_49B, layout(tp=8))
"""Llama-Nemotron 49B full fine-tuning, 32 x H100 80GB: 65 GB each, TP8."""
llama_nemotron_253b_finetune_config = finetune_recipe(LLAMA_NEMOTRON_253B, layout(tp=8, pp=9), global_batch_size=192)
"""Llama-Nemotron 253B full fine-tuning, 144 x H100 80GB: 71 GB each, TP8 PP9."""
