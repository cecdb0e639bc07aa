# SPDX-License-Identifier: Apache-2.0
"""The two spellings of a config.json: before transformers 5 (``rope_theta``, ``torch_dtype``) and since."""

from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"


def respelled(config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the other spelling."""
    return old_style(config) if "rope_parameters" in config else new_style(config)


def new_style(config: dict[str, Any]) -> dict[str, Any]:
    """``dtype``, and all that is said about rotary embeddings in ``rope_parameters``."""
    config = dict(config)
    if "torch_dtype" in config:
        config["dtype"] = config.pop("torch_dtype")
    rope = {"rope_type": "default", **(config.pop("rope_scaling", None) or {})}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in config:
            rope[key] = config.pop(key)
    if "rope_local_base_freq" in config:
        local = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq")}
        rope = {_FULL: rope, _SLIDING: local}
    if config.get("model_type") == "olmo3":  # the scaling is that of layers without a window
        rope = {_FULL: rope, _SLIDING: {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    if rope != {"rope_type": "default"}:
        config["rope_parameters"] = rope
    return config


def old_style(config: dict[str, Any]) -> dict[str, Any]:
    """``torch_dtype``, and base and scaling of rotary embeddings apart."""
    config = dict(config)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if (
        config.get("model_type") == "gemma4_text"
    ):  # no such spelling of its rotary embeddings was published
        return config
    rope = dict(config.pop("rope_parameters"))
    if _SLIDING in rope:
        config["rope_local_base_freq"] = rope[_SLIDING]["rope_theta"]
        rope = dict(rope[_FULL])
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            config[key] = rope.pop(key)
    config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    return config
