# SPDX-License-Identifier: Apache-2.0
"""Providers, bridges and the Hugging Face side of a model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

__all__ = ["GPTModelProvider"]


def __getattr__(name: str) -> Any:
    if name == "GPTModelProvider":  # reading a Hugging Face checkpoint needs no Megatron-Core
        from megatron.bridge.models.gpt_provider import GPTModelProvider

        return GPTModelProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
