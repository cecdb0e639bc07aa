# SPDX-License-Identifier: Apache-2.0
"""Providers, bridges and the Hugging Face side of a model."""

from typing import TYPE_CHECKING, Any

from megatron.bridge.utils.optional_imports import lazy_names

if TYPE_CHECKING:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.heterogeneous_provider import HeterogeneousModelProvider
    from megatron.bridge.models.mamba_provider import MambaModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider

__all__ = [
    "GPTModelProvider",
    "HeterogeneousModelProvider",
    "MLAModelProvider",
    "MambaModelProvider",
]

# imported on use: reading a Hugging Face checkpoint needs no Megatron-Core
_find_provider = lazy_names(
    __name__,
    {
        "GPTModelProvider": f"{__name__}.gpt_provider:GPTModelProvider",
        "HeterogeneousModelProvider": f"{__name__}.heterogeneous_provider:HeterogeneousModelProvider",
        "MLAModelProvider": f"{__name__}.mla_provider:MLAModelProvider",
        "MambaModelProvider": f"{__name__}.mamba_provider:MambaModelProvider",
    },
)


def __getattr__(name: str) -> Any:
    """Return a provider, or the preset of a family, such as ``LlamaModelProvider``."""
    if name.endswith("ModelProvider") and name not in __all__:
        from megatron.bridge.models.presets import provider_preset

        return provider_preset(name)
    return _find_provider(name)
