# SPDX-License-Identifier: Apache-2.0
"""Which parameters are held, trained or exported in low precision."""

import re
from fnmatch import fnmatch

# not embeddings, routers, heads, recurrent mixers and towers
_MATRIX = re.compile(r"(^|\.)(decoder|mtp)\..*\.linear_\w+\.weight\d*$")

ALWAYS_IN_FULL = ("*weights_proj*",)
"""Patterns of the weights of an indexer's heads, which are few, and which DeepSeek keeps."""


def is_matrix(parameter_name: str) -> bool:
    """Return whether a Megatron parameter is a matrix of attention, MLPs or experts."""
    return _MATRIX.search(parameter_name) is not None


def is_always_in_full(name: str) -> bool:
    """Return whether a tensor, by its Megatron or Hugging Face name, is never quantized."""
    return any(fnmatch(name, pattern) for pattern in ALWAYS_IN_FULL)
