# SPDX-License-Identifier: Apache-2.0
"""The values that recipes recommend, read from their source: nothing is imported, so a list of all is quick."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatron.bridge.recipes.catalog import Recipe

Value = str | int | None
Tables = dict[str, dict[str, Value]]

_DEFAULTS = {"pretrain": "PRETRAIN", "sft": "FINETUNE"}  # tables of ``builders.py``, by the mode of a recipe
_PARAMETERS = {"mixed_precision_recipe": "precision"}
"""Parameters of recipes whose defaults are recommended values, and the options they stand for."""


def recommended(recipe: Recipe, option: str) -> Value:
    """The value that ``recipe`` gives to ``option``, or the default of its stage; None if it is not a literal.

    Example:
        >>> from megatron.bridge.recipes.catalog import find
        >>> recommended(find("llama3_8b_16k_pretrain_config"), "seq_length")
        16384
    """
    return _recommended_by(recipe).get(option)


def _recommended_by(recipe: Recipe) -> dict[str, Value]:
    """All literals; later ones win, as in the builders."""
    family = recipe.module.rpartition(".")[2]
    (own, recipes), (builders, _), (options, _) = map(_parse, (family, "builders", "options"))
    tables, node = {**options, **own}, recipes[recipe.name]
    found = {**builders[_DEFAULTS[recipe.mode]]}
    if isinstance(node, ast.FunctionDef):
        for argument, default in zip(reversed(node.args.args), reversed(node.args.defaults), strict=False):
            found |= _literals({_PARAMETERS.get(argument.arg, argument.arg): default})
        node = node.body[-1]
    assert isinstance(node, ast.Assign | ast.Return)
    assert isinstance(node.value, ast.Call)
    for shared in node.value.args:
        found |= tables.get(shared.id, {}) if isinstance(shared, ast.Name) else {}
    return found | _literals({keyword.arg: keyword.value for keyword in node.value.keywords})


@cache
def _parse(module: str) -> tuple[Tables, dict[str, ast.stmt]]:
    """The tables of options of a module of this package, and the statements that define its recipes."""
    body = ast.parse(Path(__file__).with_name(f"{module}.py").read_text()).body
    tables: Tables = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Dict):
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
    """Those of ``values`` that are literals, by their keys."""
    return {
        key: value.value
        for key, value in values.items()
        if key is not None and isinstance(value, ast.Constant) and isinstance(value.value, str | int | None)
    }
