# SPDX-License-Identifier: Apache-2.0
"""Shrink a vision tower to toy size: the same family and parts, with layers and widths of a toy."""

from typing import Any

TOWER_HEADS = 2
TOWER_WIDTH = 32
_LAYERS = {"depth": 2, "num_hidden_layers": 2, "num_heads": TOWER_HEADS, "num_attention_heads": TOWER_HEADS}
_WIDTHS = {"embed_dim": TOWER_WIDTH, "intermediate_size": 2 * TOWER_WIDTH}
_CHOSEN_LAYERS = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
_TOKENS_PER_SIDE = 2


def shrink_tower(model: Any) -> None:
    """Shrink ``model.vision`` and the settings that depend on the width of heads, after the decoder."""
    values = model.vision
    tower = values["vision_config"]
    is_as_wide = "embed_dim" in tower  # Qwen2-VL's hidden_size is the decoder's
    widths = {**_WIDTHS, "hidden_size": model.hidden_size if is_as_wide else TOWER_WIDTH}
    widths |= {"out_hidden_size": model.hidden_size, **_LAYERS, **_CHOSEN_LAYERS}
    small = {**tower, **{name: value for name, value in widths.items() if tower.get(name) is not None}}
    text = {**values["text_config"], "hidden_size": model.hidden_size}
    text |= {"num_attention_heads": model.num_attention_heads, "num_key_value_heads": model.num_query_groups}
    if "head_dim" in text:
        text["head_dim"] = model.kv_channels
    model.vision = {**values, "vision_config": small, "text_config": text, **_image_sizes(values, small)}
    if model.mrope_section:
        model.mrope_section = _sections(model.mrope_section, int(model.kv_channels * model.rotary_percent) // 2)


def _image_sizes(values: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """Set the smallest image of a tower with a fixed image size, and return the provider's settings for it."""
    if "image_size" not in tower or "spatial_merge_size" in tower:
        return {}
    side = values.get("scale_factor") or 2  # patches along a side of one token
    tower["image_size"] = tower["patch_size"] * side * _TOKENS_PER_SIDE
    return {"mm_tokens_per_image": _TOKENS_PER_SIDE**2} if "mm_tokens_per_image" in values else {}


def _sections(sections: list[int], total: int) -> list[int]:
    """Time, height and width in the same proportions, ``total`` frequencies.

    Example:
        >>> _sections([16, 24, 24], 8)
        [2, 3, 3]
    """
    whole = sum(sections)
    first = [max(1, section * total // whole) for section in sections[:-1]]
    return [*first, total - sum(first)]
