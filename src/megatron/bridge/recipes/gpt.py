# SPDX-License-Identifier: Apache-2.0
"""GPT-3, a common benchmark of training systems.

Sizes, batch size and learning rates are from "Language Models are Few-Shot Learners" (2020), without its locally
banded sparse attention. The weights were never published; the tokenizer is GPT-2's.
"""

from megatron.bridge.recipes.builders import pretrain_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import ProviderSize

GPT3_175B = ProviderSize(
    "openai-community/gpt2",
    {
        "num_layers": 96,
        "hidden_size": 12288,
        "ffn_hidden_size": 49152,
        "num_attention_heads": 96,
        "vocab_size": 50257,
        "should_pad_vocab": True,
        "position_embedding_type": "learned_absolute",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    published=False,
)

gpt3_175b_pretrain_config = pretrain_recipe(
    GPT3_175B,
    layout(tp=8, pp=4, vp=6),
    what="GPT-3 175B pretraining",
    gpus=128,
    memory_gb=62,
    seq_length=2048,
    global_batch_size=1536,
    lr=6e-5,
    min_lr=6e-6,
)
