# SPDX-License-Identifier: Apache-2.0
"""Published configs with the keys of today's transformers, which bridges read.

Transformers renames old keys when it makes a config. Importing it takes longer than everything else that a recipe
does, so recipes rename the few keys that they use here.
"""

from collections.abc import Mapping
from typing import Any

_RENAMED = {"qwen3_moe": {"num_experts": "num_local_experts"}}

_LAYER_PATTERNS = {
    "gemma2": ("sliding_attention", 2),
    "gemma3_text": ("sliding_attention", 6),
    "gpt_oss": ("sliding_attention", 2),
    "qwen3_next": ("linear_attention", 4),
}
"""Families with full attention in every N-th layer: the type of the other layers, and N."""

_UNIFORM_LAYERS = ("qwen2", "qwen2_moe", "qwen3", "smollm3")
"""Families whose configs list layer types although all layers have full attention."""

_REPLACED_BY_LAYER_TYPES = ("full_attention_interval", "sliding_window_pattern")

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "nemotron_h": {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4},
}
"""Defaults of transformers that bridges do not have and sizes do not give."""


def current(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The entries ``numbers`` of a ``config.json``, with today's keys."""
    kind = numbers["model_type"]
    renamed = _RENAMED.get(kind, {})
    entries = {renamed.get(key, key): value for key, value in numbers.items() if key not in _REPLACED_BY_LAYER_TYPES}
    return {**_DEFAULTS.get(kind, {}), **_rope(entries), **_layer_types(kind, numbers)}


def _rope(entries: dict[str, Any]) -> dict[str, Any]:
    """Move all rotary settings under ``rope_parameters``."""
    if "rope_theta" not in entries:
        return entries
    scaling: dict[str, Any] = entries.pop("rope_scaling", None) or {}
    theta, share = entries.pop("rope_theta"), entries.pop("partial_rotary_factor", None)
    partial = {} if share is None else {"partial_rotary_factor": share}
    parameters: dict[str, Any] = {**scaling, "rope_theta": theta, **partial}
    parameters.setdefault(
        "rope_type", scaling.get("type", "default")
    )  # transformers keeps the old name beside the new one
    if "rope_local_base_freq" in entries:
        local = {"rope_type": "default", "rope_theta": entries.pop("rope_local_base_freq")}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    return {**entries, "rope_parameters": parameters}


def _layer_types(kind: str, numbers: Mapping[str, Any]) -> dict[str, list[Any]]:
    count = range(1, numbers["num_hidden_layers"] + 1) if "num_hidden_layers" in numbers else ()
    if kind in _LAYER_PATTERNS:
        other, period = _LAYER_PATTERNS[kind]
        return {"layer_types": [other if layer % period else "full_attention" for layer in count]}
    if kind not in _UNIFORM_LAYERS:
        return {}
    rotated = {"no_rope_layers": [int(layer % 4 != 0) for layer in count]} if kind == "smollm3" else {}
    return {"layer_types": ["full_attention" for _ in count], **rotated}
