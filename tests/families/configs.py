# SPDX-License-Identifier: Apache-2.0
"""Hugging Face config -> provider -> Hugging Face config: what is not the same afterwards."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.fields import IRRELEVANT

# keys that transformers turns into another one, which is the one it computes with
_SPELLED_OUT = {
    "max_window_layers": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "sliding_window_pattern": "layer_types",
    "_sliding_window_pattern": "layer_types",
}


def round_trip(config: Any) -> list[str]:
    """A line for each key that matters and is not the same in the config that the provider is written as."""
    bridge = AutoBridge.from_hf_config(config)
    provider = bridge.to_megatron_provider(load_weights=False)
    written = bridge._bridge.megatron_to_hf_config(provider)
    rebuilt = type(config)(**written)
    problems = different_keys(config.to_dict(), rebuilt.to_dict(), harmless(bridge))
    again = AutoBridge.from_hf_config(rebuilt).to_megatron_provider(load_weights=False)
    return problems + different_providers(provider, again)


def harmless(bridge: AutoBridge) -> set[str]:
    """Keys that change nothing, whatever their value; what is written is never quantised."""
    known = {**IRRELEVANT, **getattr(bridge._bridge, "irrelevant", {})}
    return {key for key, values in known.items() if values is None} | {"quantization_config"}


def different_keys(wanted: Mapping[str, Any], found: Mapping[str, Any], ignored: set[str]) -> list[str]:
    """A line for each key of ``wanted`` that has another value in ``found``."""
    problems: list[str] = []
    for key, value in wanted.items():
        now = found.get(key)
        means = _SPELLED_OUT.get(key)
        if key in ignored or now == value or (means in wanted and wanted[means] == found.get(means)):
            continue
        if key == "head_dim" and value is None and now * wanted["num_attention_heads"] == wanted["hidden_size"]:
            continue
        if key == "dtype" and value is None and now == "float32":
            continue
        problems.append(f"{key}={value!r} is {now!r} after the round trip")
    return problems


def different_providers(one: Any, other: Any) -> list[str]:
    """A line for each attribute in which two providers differ."""
    return [
        f"provider.{field.name}={getattr(one, field.name)!r} is {getattr(other, field.name)!r} when read again"
        for field in dataclasses.fields(one)
        if getattr(one, field.name) != getattr(other, field.name)
    ]
