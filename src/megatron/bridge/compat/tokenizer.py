# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a program with its own loop."""

from typing import Any

from megatron.bridge.data import tokenizer as tokenizers
from megatron.bridge.data.tokenizer import TokenizerConfig
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size


def build_tokenizer(
    config: TokenizerConfig,
    make_vocab_size_divisible_by: int = 1,
    tensor_model_parallel_size: int = 1,
) -> Any:
    """The tokenizer, whose ``padded_vocab_size`` is its size rounded up as a model's embedding."""
    tokenizer: Any = tokenizers.build_tokenizer(config)
    sizes = (tokenizer.vocab_size, max(1, make_vocab_size_divisible_by), tensor_model_parallel_size)
    tokenizer.padded_vocab_size = calculate_padded_vocab_size(*sizes)
    return tokenizer
