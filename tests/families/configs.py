# SPDX-License-Identifier: Apache-2.0
"""Hugging Face config -> provider -> Hugging Face config: what is not the same afterwards."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.declare.fields import IRRELEVANT, HarmlessKeys
from megatron.bridge.testing.family import config_in_both_directions, different_providers

__all__ = ["different_keys", "different_providers", "harmless", "round_trip"]

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
    return problems + config_in_both_directions(bridge)


def harmless(bridge: AutoBridge) -> HarmlessKeys:
    """Keys that change nothing, and with which values; what is written is never quantised."""
    return {**IRRELEVANT, **getattr(bridge._bridge, "irrelevant", {}), "quantization_config": None}


def different_keys(
    wanted: Mapping[str, Any], found: Mapping[str, Any], ignored: HarmlessKeys
) -> list[str]:
    """A line for each key of ``wanted`` that has another value in ``found``."""
    return [
        f"{key}={value!r} is {found.get(key)!r} after the round trip"
        for key, value in wanted.items()
        if value != found.get(key) and not _means_the_same(key, wanted, found, ignored)
    ]


def _means_the_same(
    key: str, wanted: Mapping[str, Any], found: Mapping[str, Any], ignored: HarmlessKeys
) -> bool:
    value, now = wanted[key], found.get(key)
    if isinstance(value, list) and value and all(one == now for one in value):
        return True  # one number for all layers
    if key in ignored and ((values := ignored[key]) is None or value in values):
        return True
    if key == "rope_parameters" and "rope_type" in (value or ()):
        whole = {
            "partial_rotary_factor": 1.0
        }  # said or not; the type's older spelling may stand beside it
        return {**whole, **{name: item for name, item in value.items() if name != "type"}} == {
            **whole,
            **now,
        }
    if key == "head_dim" and value is None:
        return now * wanted["num_attention_heads"] == wanted["hidden_size"]
    if key == "dtype" and value is None:
        return now == "float32"
    if key == "rope_parameters":
        return _without_whole(value) == _without_whole(now)
    spelled_out = _SPELLED_OUT.get(key)
    return spelled_out in wanted and wanted[spelled_out] == found.get(spelled_out)


def _without_whole(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Without a ``partial_rotary_factor`` of one, which is as good as none."""
    return {
        key: value for key, value in rope.items() if (key, value) != ("partial_rotary_factor", 1.0)
    }
