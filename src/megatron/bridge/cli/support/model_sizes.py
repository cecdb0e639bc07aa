# SPDX-License-Identifier: Apache-2.0
"""What happens to the other sizes of a recipe's model if a user changes one of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megatron.bridge.utils.config.overrides import Change

_FOLLOWING: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], int]]] = {
    "kv_channels": (
        ("hidden_size", "num_attention_heads"),
        lambda sizes: sizes["hidden_size"] // sizes["num_attention_heads"],
    ),
    "num_query_groups": (("num_attention_heads",), lambda sizes: sizes["num_attention_heads"]),
}
"""Size -> the sizes that it usually follows from, and how."""
_KEPT = {
    "hidden_size": (
        "kv_channels",
        "ffn_hidden_size",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "q_lora_rank",
        "kv_lora_rank",
    ),
    "num_attention_heads": ("kv_channels", "num_query_groups"),
}
"""Size -> the sizes that a smaller or larger model usually changes with it; features of layers add theirs."""


def follow_sizes(model: Any, changes: Sequence[Change]) -> tuple[list[Change], list[str]]:
    """Derive sizes anew that the recipe's model derives from sizes that the user has changed.

    A size follows if it was, in the recipe, what follows from the others, and if the user has not set it. All other
    sizes stay, and a note names them.

    Args:
        model: The provider, with the changes; it is changed further.
        changes: What the user has set.

    Returns:
        Further changes, and notes.
    """
    before = {change.key.removeprefix("model."): change.old for change in reversed(changes)}
    chosen = {change.key.removeprefix("model.") for change in changes if _is_of_model(change)}
    changed = [
        name for name in _KEPT if name in chosen and before[name] != getattr(model, name, None)
    ]
    if not changed or getattr(model, "multi_latent_attention", False):
        return [], _kept_note(model, changed, chosen)
    further: list[Change] = []
    for name, (sources, derive) in _FOLLOWING.items():
        old = getattr(model, name, None)
        in_recipe = {source: before.get(source, getattr(model, source)) for source in sources}
        if name in chosen or old is None or not set(sources).intersection(changed):
            continue
        if not all(in_recipe.values()) or old != derive(in_recipe):
            continue
        new = derive({source: getattr(model, source) for source in sources})
        if new != old:
            setattr(model, name, new)
            origin = " and ".join(f"model.{source}" for source in sources)
            further.append(Change(f"model.{name}", old, new, origin))
    followed = {change.key.removeprefix("model.") for change in further}
    notes = [
        f"{change.key}={change.new} is used, because it follows from {change.origin} as in the recipe, where it "
        f"was {change.old}: set {change.key} for another value"
        for change in further
    ]
    return further, [*notes, *_kept_note(model, changed, chosen | followed)]


def _is_of_model(change: Change) -> bool:
    return change.key.startswith("model.")


def _sizes_of_features() -> list[str]:
    """Return the sizes of layer features that a model with another width usually changes as well."""
    from megatron.bridge.models.features.registry import FEATURES

    return [name for feature in FEATURES for name in feature.scales_with_width]


def _kept_note(model: Any, changed: Sequence[str], settled: set[str]) -> list[str]:
    names = dict.fromkeys(name for source in changed for name in _KEPT[source])
    if "hidden_size" in changed:
        names |= dict.fromkeys(_sizes_of_features())
    # a size that a kind of layer does not have keeps its default, which says nothing
    unused = {field.name: field.default for field in dataclasses.fields(model)}
    kept = [
        f"model.{name}={getattr(model, name)}"
        for name in names
        if name not in settled and getattr(model, name, None) not in (None, unused.get(name))
    ]
    if not kept:
        return []
    sources = " and ".join(f"model.{name}" for name in changed)
    return [f"{sources} changed, and of the recipe's sizes stay {', '.join(kept)}: set them, too"]
