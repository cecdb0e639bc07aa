# SPDX-License-Identifier: Apache-2.0
"""Padding of vocabularies."""


def calculate_padded_vocab_size(
    vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int = 1
) -> int:
    """Return the number of rows of the embedding over all ranks.

    Example:
        >>> calculate_padded_vocab_size(32003, 128, 2)
        32256
    """
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
