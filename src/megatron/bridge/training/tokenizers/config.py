# SPDX-License-Identifier: Apache-2.0
"""``TokenizerConfig`` under its public name; it lives with the data that it serves."""

from megatron.bridge.data.tokenizer import TokenizerConfig, build_tokenizer

__all__ = ["TokenizerConfig", "build_tokenizer"]
