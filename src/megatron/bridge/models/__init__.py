# SPDX-License-Identifier: Apache-2.0
"""Providers, bridges and the Hugging Face side of a model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.heterogeneous_provider import HeterogeneousModelProvider
    from megatron.bridge.models.mamba_provider import MambaModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider

__all__ = ["GPTModelProvider", "HeterogeneousModelProvider", "MLAModelProvider", "MambaModelProvider"]

# imported on use: reading a Hugging Face checkpoint needs no Megatron-Core
_HOMES = {
    "GPTModelProvider": "gpt_provider",
    "HeterogeneousModelProvider": "heterogeneous_provider",
    "MLAModelProvider": "mla_provider",
    "MambaModelProvider": "mamba_provider",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
