# SPDX-License-Identifier: Apache-2.0
"""All recipes of this package by name. Importing them does not import torch."""

from functools import cache

from megatron.bridge import recipes
from megatron.bridge.recipes.recipe import Recipe
from megatron.bridge.utils.errors import UserError, did_you_mean


@cache
def catalog() -> dict[str, Recipe]:
    """Return every recipe by name, in alphabetical order."""
    members = vars(recipes)
    return {name: members[name] for name in sorted(members) if isinstance(members[name], Recipe)}


def find(name: str) -> Recipe:
    """Return the recipe ``name``; an error suggests the nearest names."""
    recipes_by_name = catalog()
    if name not in recipes_by_name:
        hint = (
            did_you_mean(name, recipes_by_name)
            or "; `megatron-bridge train --list` shows all of them"
        )
        raise UserError(f"there is no recipe {name}{hint}")
    return recipes_by_name[name]


def search(text: str) -> list[Recipe]:
    """Return the recipes whose name, stage, description or GPUs contain every word of ``text``.

    Example:
        >>> [recipe.name for recipe in search("smollm2 pretrain 135m")]
        ['smollm2_135m_pretrain_config']
    """
    words = text.lower().split()
    return [recipe for recipe in catalog().values() if _contains_all(recipe, words)]


def _contains_all(recipe: Recipe, words: list[str]) -> bool:
    gpus = f"{recipe.gpus}x{recipe.gpu_kind}"
    line = f"{recipe.name} {recipe.stage} {recipe.what} {gpus}".lower()
    return all(word in line for word in words)
