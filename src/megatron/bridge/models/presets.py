# SPDX-License-Identifier: Apache-2.0
"""The bridges and providers of a family under the names that other programs import.

``from megatron.bridge.models.llama import LlamaBridge`` and ``from megatron.bridge.models import LlamaModelProvider``.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.declare.fields import ConfigError
from megatron.bridge.models.conversion.model_bridge import DecoderBridge
from megatron.bridge.utils.errors import UserError, one_line

PROVIDER = "ModelProvider"
BRIDGE = "Bridge"

_SIZES = frozenset(
    {
        "ffn_hidden_size",
        "hidden_size",
        "kv_channels",
        "max_position_embeddings",
        "num_attention_heads",
        "num_layers",
        "num_moe_experts",
        "num_query_groups",
        "seq_length",
        "vocab_size",
    }
)
"""What differs between the models of one family: a preset leaves it to the caller."""


def lazy_bridges(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a family's ``package``: its bridges, imported at their first use."""

    def find(name: str) -> Any:
        if name.endswith(BRIDGE):
            folder = importlib.import_module(package)
            for module in pkgutil.iter_modules(folder.__path__, f"{package}."):
                if module.name.endswith("_bridge"):
                    bridge = getattr(importlib.import_module(module.name), name, None)
                    if bridge is not None:
                        return bridge
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def provider_preset(name: str) -> Callable[..., Any]:
    """Return the function that makes the provider of a family, such as ``LlamaModelProvider``.

    The function takes the fields of the provider by keyword. Those that are left out have the values of the family;
    sizes (``num_layers``, ``hidden_size``, ...) and what each layer has of its own are the caller's.

    Args:
        name: ``LlamaModelProvider`` is the preset of ``LlamaBridge``.

    Raises:
        AttributeError: No family's bridge has this name.
    """
    family = name.removesuffix(PROVIDER)
    architectures = {
        bridge.__name__.removesuffix(BRIDGE): architecture
        for architecture, bridge in model_bridge.declared_bridges().items()
    }
    if not name.endswith(PROVIDER) or family not in architectures:
        raise AttributeError(f"module 'megatron.bridge.models' has no attribute {name!r}")
    architecture = architectures[family]

    def make_provider(**settings: Any) -> Any:
        preset = family_preset(architecture)
        return type(preset)(**{**family_settings(preset), **settings})

    make_provider.__name__ = make_provider.__qualname__ = name
    make_provider.__doc__ = f"Return a provider of {architecture}; sizes are the caller's."
    return make_provider


@cache
def family_preset(architecture: str) -> Any:
    """Return the provider of the default config that transformers has for a family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    registration = model_bridge.registration_of(architecture)
    try:
        config = CONFIG_MAPPING[str(registration.model_type)](architectures=[architecture])
        bridge = model_bridge.bridge_for(config)
        assert isinstance(bridge, DecoderBridge), f"{architecture} is not a declaration"
        return bridge.provider_of(config.to_dict(), config.to_dict())
    except (KeyError, TypeError, ConfigError) as error:
        raise UserError(
            f"the default config of {architecture} in transformers describes no model ({one_line(error)}): use "
            "AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)"
        ) from error


def family_settings(preset: Any) -> dict[str, Any]:
    """Return the settings of a provider that are the same for all sizes."""
    names = {field.name for field in dataclasses.fields(preset) if field.init} - _SIZES
    settings = {name: getattr(preset, name) for name in sorted(names)}
    return {
        name: value
        for name, value in settings.items()
        if not isinstance(value, list | tuple | dict)
    }
