# SPDX-License-Identifier: Apache-2.0
"""The provider of hybrid models, and its layers, under the paths at which other programs import them."""

from megatron.bridge.compat.layer_specs import (
    get_default_mamba_stack_spec,
    modelopt_mamba_stack_spec,
    transformer_engine_mamba_stack_spec,
)
from megatron.bridge.models.mamba_provider import MambaModelProvider

__all__ = [
    "HybridModelProvider",
    "MambaModelProvider",
    "get_default_hybrid_stack_spec",
    "get_default_mamba_stack_spec",
    "modelopt_hybrid_stack_spec",
    "modelopt_mamba_stack_spec",
    "transformer_engine_hybrid_stack_spec",
    "transformer_engine_mamba_stack_spec",
]

HybridModelProvider = MambaModelProvider
get_default_hybrid_stack_spec = get_default_mamba_stack_spec
modelopt_hybrid_stack_spec = modelopt_mamba_stack_spec
transformer_engine_hybrid_stack_spec = transformer_engine_mamba_stack_spec
