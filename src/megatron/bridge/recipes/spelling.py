# SPDX-License-Identifier: Apache-2.0
"""Published configs in the spelling that transformers has now and that bridges read.

Transformers translates old keys whenever it makes a config. Recipes do it here, for the few keys that their sizes
use, since importing transformers takes longer than all else that a recipe needs.
"""

from collections.abc import Mapping
from typing import Any

_RENAMED = {"qwen3_moe": {"num_experts": "num_local_experts"}}

_OTHER_LAYERS = {
    "gemma2": ("sliding_attention", 2),
    "gemma3_text": ("sliding_attention", 6),
    "gpt_oss": ("sliding_attention", 2),
    "qwen3_next": ("linear_attention", 4),
}
"""Families whose layers attend to everything only every so many."""

_EQUAL_LAYERS = ("qwen2", "qwen2_moe", "qwen3", "smollm3")
"""Families that list what each layer attends to, where it is the same for all."""

_SAID_BY_LAYERS = ("full_attention_interval", "sliding_window_pattern")

_ASSUMED: dict[str, dict[str, Any]] = {
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "nemotron_h": {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4},
}
"""What transformers assumes where a bridge does not, and sizes do not say."""


def current(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The entries ``numbers`` of a ``config.json``, spelt as of today."""
    kind = numbers["model_type"]
    renamed = _RENAMED.get(kind, {})
    entries = {renamed.get(key, key): value for key, value in numbers.items() if key not in _SAID_BY_LAYERS}
    return {**_ASSUMED.get(kind, {}), **_rope(entries), **_layers(kind, numbers)}


def _rope(entries: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings under one key."""
    if "rope_theta" not in entries:
        return entries
    scaling: dict[str, Any] = entries.pop("rope_scaling", None) or {}
    theta, share = entries.pop("rope_theta"), entries.pop("partial_rotary_factor", None)
    partial = {} if share is None else {"partial_rotary_factor": share}
    parameters: dict[str, Any] = {**scaling, "rope_theta": theta, **partial}
    parameters.setdefault("rope_type", scaling.get("type", "default"))  # the old name may stay beside the new
    if "rope_local_base_freq" in entries:
        local = {"rope_type": "default", "rope_theta": entries.pop("rope_local_base_freq")}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    return {**entries, "rope_parameters": parameters}


def _layers(kind: str, numbers: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What each layer is, in words."""
    count = range(1, numbers["num_hidden_layers"] + 1) if "num_hidden_layers" in numbers else ()
    if kind in _OTHER_LAYERS:
        other, every = _OTHER_LAYERS[kind]
        return {"layer_types": [other if layer % every else "full_attention" for layer in count]}
    if kind not in _EQUAL_LAYERS:
        return {}
    rotated = {"no_rope_layers": [int(layer % 4 != 0) for layer in count]} if kind == "smollm3" else {}
    return {"layer_types": ["full_attention" for _ in count], **rotated}
