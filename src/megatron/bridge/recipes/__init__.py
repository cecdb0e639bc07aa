# SPDX-License-Identifier: Apache-2.0
"""Recipes: functions that return a whole config, good as it stands.

``megatron.bridge.recipes.llama.llama32_1b_pretrain_config(train_iters=100)``, for example; ``catalog`` finds them
by name, and so does this package: ``from megatron.bridge.recipes import llama32_1b_pretrain_config``.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """A recipe, or one of their parts, imported when it is asked for."""
    if name == "default_peft_config":
        from megatron.bridge.recipes.adapters import default_peft_config

        return default_peft_config
    if name == "default_squad_config":
        from megatron.bridge.recipes.datasets import default_squad_config

        return default_squad_config
    if "_config" in name:
        from megatron.bridge.recipes.catalog import catalog

        if name in catalog():
            return catalog()[name].function()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
