# SPDX-License-Identifier: Apache-2.0
"""Look up fields by config key, and settings by parameter, for messages."""

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import Any, cast

from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.mappings import patterns
from megatron.bridge.utils.errors import misspelling

_DECLARE = __name__.rpartition(".")[0]

MADE_BY = {
    "**_bda.norm.*": "norm_placement",
    "**_layernorm.weight": "normalization, norm_placement, qk_layernorm or qk_norm_across_heads",
    "**norm.bias": "normalization",
    "**.linear_qkv.bias": "add_qkv_bias or add_bias_linear",
    "**.linear_proj.bias": "attention_output_bias or add_bias_linear",
    "**.shared_experts.**": "moe_shared_expert_intermediate_size",
    "**.router.expert_bias": "moe_router_enable_expert_bias",
    "**.router.**": "num_moe_experts or moe_layer_freq",
    "**.experts.**": "num_moe_experts or moe_layer_freq",
    "output_layer.bias": "output_bias",
    "**.bias": "attention_bias, mlp_bias or add_bias_linear",
    "output_layer.weight": "share_embeddings_and_output_weights",
}
"""Patterns of Megatron parameters -> the provider settings that create them; the first match counts."""


def made_by(parameter: str) -> str:
    """Return a phrase with the settings that create ``parameter``, or an empty string if they are not known."""
    matching_settings = (
        settings
        for pattern, settings in MADE_BY.items()
        if patterns.match(pattern, parameter) is not None
    )
    settings = next(matching_settings, "")
    return f"; {settings} makes it" if settings else ""


@cache
def field_groups() -> dict[str, tuple[Field, ...]]:
    """Return the fields and groups of fields that bridges share, by their names in ``models.families``."""
    groups: dict[str, tuple[Field, ...]] = {}
    for module in pkgutil.iter_modules(importlib.import_module(_DECLARE).__path__):
        for name, value in vars(importlib.import_module(f"{_DECLARE}.{module.name}")).items():
            group = cast(tuple[Any, ...], value if isinstance(value, tuple) else (value,))
            if (
                not name.startswith("_")
                and group
                and all(isinstance(field, Field) for field in group)
            ):
                groups[name] = group
    return groups


def groups_with(key: str) -> list[str]:
    """Return the names of the fields and groups that read a config key, the smallest first."""
    groups = field_groups()
    return sorted(
        (name for name in groups if any(f.hf == key for f in groups[name])),
        key=lambda n: len(groups[n]),
    )


def key_hint(key: str, claimed: Iterable[str], families: Iterable[str]) -> str:
    """Suggest what to do about a config key that is not ``claimed`` by an architecture, but by ``families``."""
    if meant := misspelling(key, claimed):
        return meant
    readers = " or ".join(groups_with(key)[:2])
    other_families = ", ".join(list(families)[:2])
    known = (
        f"{readers or 'a field'} reads it{f' in {other_families}' if other_families else ''}; "
        if readers or other_families
        else ""
    )
    return f": {known}remove it if it changes nothing"
