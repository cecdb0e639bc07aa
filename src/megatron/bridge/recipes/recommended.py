# SPDX-License-Identifier: Apache-2.0
"""What a recipe recommends, read from its source text: nothing is imported, so a list of all takes no time."""

import ast
from functools import cache
from pathlib import Path

from megatron.bridge.recipes.catalog import Recipe

_ROOT = Path(__file__).parents[2]  # of the package ``megatron``


def recommended(recipe: Recipe, option: str) -> str | int | None:
    """The value that ``recipe`` gives to ``option``, else the default of its stage; None if it is not a literal.

    Example:
        >>> from megatron.bridge.recipes.catalog import find
        >>> recommended(find("llama3_8b_16k_pretrain_config"), "seq_length")
        16384
    """
    functions = _functions(recipe.module)
    value = _given(functions[recipe.name], functions, option)
    return _defaults().get((recipe.mode, option)) if value is None else value


def _given(node: ast.FunctionDef, functions: dict[str, ast.FunctionDef], option: str) -> str | int | None:
    """From the call that the function returns; what that function of the same module gives, if it does not."""
    default = _argument(node, option)
    for call in (part.value for part in ast.walk(node) if isinstance(part, ast.Return)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        for keyword in call.keywords:
            if keyword.arg == option and isinstance(keyword.value, ast.Constant):
                return keyword.value.value  # pyright: ignore[reportReturnType]
        if call.func.id in functions and functions[call.func.id] is not node:
            return default or _given(functions[call.func.id], functions, option)
    return default


def _argument(node: ast.FunctionDef, option: str) -> str | int | None:
    """A recipe may take the option itself, under a name of its own: ``mixed_precision_recipe``."""
    names = [argument.arg for argument in node.args.args]
    known = {"precision": "mixed_precision_recipe"}.get(option, option)
    if known not in names or not node.args.defaults:
        return None
    default = node.args.defaults[names.index(known) - len(names)]
    return default.value if isinstance(default, ast.Constant) else None  # pyright: ignore[reportReturnType]


@cache
def _functions(module: str) -> dict[str, ast.FunctionDef]:
    path = _ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@cache
def _defaults() -> dict[tuple[str, str], str | int]:
    """Literals of the tables ``PRETRAIN`` and ``FINETUNE`` of ``core``, and of those that they contain."""
    tables: dict[str, dict[str, str | int]] = {}
    for node in ast.parse((Path(__file__).parent / "core.py").read_text()).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Dict)
        ):
            tables[node.target.id] = _literals(node.value, tables)
    stages = {"pretrain": tables["PRETRAIN"], "sft": tables["FINETUNE"]}
    return {(stage, name): value for stage, table in stages.items() for name, value in table.items()}


def _literals(node: ast.Dict, tables: dict[str, dict[str, str | int]]) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None and isinstance(value, ast.Name):  # **OTHER
            found |= tables.get(value.id, {})
        elif isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
            found[str(key.value)] = value.value  # pyright: ignore[reportArgumentType]
    return found
