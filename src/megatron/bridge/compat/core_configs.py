# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's configs of layers under the path at which other programs import them."""

from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

__all__ = ["HeterogeneousTransformerConfig", "MLATransformerConfig", "TransformerConfig"]
