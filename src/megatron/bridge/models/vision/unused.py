# SPDX-License-Identifier: Apache-2.0
"""Parameters of a tower that no feature depends on: they are carried along and never trained."""

import re
from functools import cache
from typing import Any

_LAYER = re.compile(r"\.layers?\.(\d+)\.")


def unused_parameters(tower: Any) -> frozenset[str]:
    """Names of the parameters behind the last layer that features are taken from, and of pooling heads."""
    return _found(tower)


@cache
def _found(tower: Any) -> frozenset[str]:
    names = [name for name, _ in tower.named_parameters()]
    return frozenset(name for name in names if name.startswith("vision_tower.") and _is_unused(name, tower.config))


def _is_unused(name: str, config: Any) -> bool:
    if name.startswith(("vision_tower.head.", "vision_tower.vision_model.head.")):
        return True  # SigLIP's pooling
    taken = _layers_taken(config)
    if taken is None:
        return False
    layer = _LAYER.search(name)
    return "post_layernorm" in name or (layer is not None and int(layer[1]) >= taken)


def _layers_taken(config: Any) -> int | None:
    """How many layers of the tower features need; None for all of them, and what comes after."""
    chosen = getattr(config, "vision_feature_layer", None)
    if chosen is None:
        return None
    layers = config.vision_config.num_hidden_layers
    wanted = [chosen] if isinstance(chosen, int) else list(chosen)
    return max(layer if layer >= 0 else layers + 1 + layer for layer in wanted)
