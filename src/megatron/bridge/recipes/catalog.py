# SPDX-License-Identifier: Apache-2.0
"""All recipes by name, and their recommended values, without an import of torch.

A recipe is a public name that ends in its stage and ``_config``, such as ``_pretrain_config``, in a module
``recipes/<family>.py``. Its row in ``catalog.yaml`` has the form ``what it trains, N x GPU: M GB each, layout.`` and
becomes its docstring; ``make recipes`` writes M.
"""

import ast
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

Mode = Literal["pretrain", "sft"]
Stage = Literal["pretrain", "sft", "distill", "dpo"]
Value = str | int | None
Tables = dict[str, dict[str, Value]]

_DEFAULTS = {
    "pretrain": "PRETRAIN",
    "sft": "FINETUNE",
}  # tables of ``builders.py``, by the mode of a recipe
_PARAMETERS = {"mixed_precision_recipe": "precision"}
"""Parameters of recipes whose defaults are recommended values, and the options they stand for."""

_SUMMARY = re.compile(
    r"^(?P<what>.+), (?P<count>\d+) x (?P<kind>[^:,]+): (?P<memory>\d+) GB(?: each)?, (?P<layout>.+)\.$"
)


@dataclass(frozen=True)
class Recipe:
    """The properties of a recipe that are known without its import."""

    name: str
    module: str
    what: str
    gpus: int  # number of GPUs of its layout
    gpu_kind: str  # their type
    memory: (
        int  # GB (10^9 bytes) that the fullest GPU uses, rounded up, as ``autotune.memory`` counts
    )
    layout: str  # model-parallel sizes, such as ``TP8 PP2``, or ``no model parallelism``
    summary: str  # all properties as a sentence

    @property
    def mode(self) -> Mode:
        """Return the stage whose options the recipe takes."""
        return (
            "sft" if "_finetune_config" in self.name or "_dpo_config" in self.name else "pretrain"
        )

    @property
    def stage(self) -> Stage:
        """Return the stage of training. Distillation takes the options of pretraining, DPO those of fine-tuning."""
        if "_dpo_config" in self.name:
            return "dpo"
        return "distill" if "_distill_config" in self.name else self.mode

    def function(self) -> "Callable[..., ConfigContainer]":
        return getattr(importlib.import_module(self.module), self.name)

    def build(self, **options: Any) -> "ConfigContainer":
        return self.function()(**options)


@cache
def catalog() -> dict[str, Recipe]:
    """Return every recipe by name, in alphabetical order."""
    families = yaml_text.tables_beside(__file__)
    rows = [
        (name, family, text) for family, texts in families.items() for name, text in texts.items()
    ]
    return {
        name: _parse(name, f"{__package__}.{family}", text) for name, family, text in sorted(rows)
    }


def name_functions(module: str) -> None:
    """Set the names and docstrings of a family's recipes, for pickle and help."""
    for recipe in catalog().values():
        if recipe.module == module:
            function = recipe.function()
            function.__module__, function.__doc__ = recipe.module, recipe.summary
            function.__name__ = function.__qualname__ = recipe.name


def find(name: str) -> Recipe:
    """Return the recipe ``name``; an error suggests the nearest names."""
    recipes = catalog()
    if name not in recipes:
        hint = did_you_mean(name, recipes) or "; `megatron-bridge train --list` shows all of them"
        raise UserError(f"there is no recipe {name}{hint}")
    return recipes[name]


def search(text: str) -> list[Recipe]:
    """Recipes whose name, stage or description contains every word of ``text``.

    Example:
        >>> [recipe.name for recipe in search("smollm2 pretrain 135m")]
        ['smollm2_135m_pretrain_config']
    """
    words = text.lower().split()
    shown = {
        it: f"{it.name} {it.stage} {it.what} {it.gpus}x{it.gpu_kind}".lower()
        for it in catalog().values()
    }
    return [recipe for recipe, line in shown.items() if all(word in line for word in words)]


def _parse(name: str, module: str, summary: str) -> Recipe:
    match = _SUMMARY.match(summary)
    assert match, f"{name} in catalog.yaml must read 'what it trains, N x GPU: M GB each, layout.'"
    count, memory = int(match["count"]), int(match["memory"])
    return Recipe(
        name, module, match["what"], count, match["kind"], memory, match["layout"], summary
    )


def recommended(recipe: Recipe) -> dict[str, Value]:
    """Return the literal options of ``recipe`` and its stage; later options override earlier ones, as in builders.

    Example:
        >>> recommended(find("llama3_8b_16k_pretrain_config"))["seq_length"]
        16384
    """
    family = recipe.module.rpartition(".")[2]
    (own, recipes), (builders, _), (options, _) = map(_definitions, (family, "builders", "options"))
    tables, node = {**options, **own}, recipes[recipe.name]
    found = {**builders[_DEFAULTS[recipe.mode]]}
    if isinstance(node, ast.FunctionDef):
        for argument, default in zip(
            reversed(node.args.args), reversed(node.args.defaults), strict=False
        ):
            found |= _literals({_PARAMETERS.get(argument.arg, argument.arg): default})
        node = node.body[-1]
    assert isinstance(node, ast.Assign | ast.Return)
    assert isinstance(node.value, ast.Call)
    for shared in node.value.args:
        found |= tables.get(shared.id, {}) if isinstance(shared, ast.Name) else {}
    return found | _literals({keyword.arg: keyword.value for keyword in node.value.keywords})


@cache
def _definitions(module: str) -> tuple[Tables, dict[str, ast.stmt]]:
    """Return the tables of options of a module of this package, and the statements that define its recipes."""
    body = ast.parse(Path(__file__).with_name(f"{module}.py").read_text()).body
    tables: Tables = {}
    for node in body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Dict)
        ):
            tables[node.target.id] = _table(node.value, tables)
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    assigned = {ast.unparse(node.targets[0]): node for node in body if isinstance(node, ast.Assign)}
    return tables, {**functions, **assigned}


def _table(node: ast.Dict, tables: Tables) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None and isinstance(value, ast.Name):  # **OTHER
            found |= tables.get(value.id, {})
        elif isinstance(key, ast.Constant):
            found |= _literals({str(key.value): value})
    return found


def _literals(values: Mapping[Any, ast.expr]) -> dict[str, Value]:
    return {
        key: value.value
        for key, value in values.items()
        if key is not None
        and isinstance(value, ast.Constant)
        and isinstance(value.value, str | int | None)
    }
