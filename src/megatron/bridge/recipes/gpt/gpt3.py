# SPDX-License-Identifier: Apache-2.0
"""GPT-3, the model by which systems are compared.

Numbers, batch and learning rates are those of "Language Models are Few-Shot Learners" (2020), but for its locally
banded sparse attention. It was never published; its tokenizer is that of GPT-2.
"""

from typing import Unpack

from megatron.bridge.recipes.core import pretrain
from megatron.bridge.recipes.options import PretrainOptions
from megatron.bridge.recipes.sizes import Unbridged
from megatron.bridge.training.config import ConfigContainer

GPT3_175B = Unbridged(
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


def gpt3_175b_pretrain_config(**options: Unpack[PretrainOptions]) -> ConfigContainer:
    """GPT-3 175B from random weights, 128 x H100 80GB: 63 GB each, TP8 PP4, the fewest that fit."""
    return pretrain(
        GPT3_175B,
        options,
        seq_length=2048,
        global_batch_size=1536,
        lr=6e-5,
        min_lr=6e-6,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=6,
    )
