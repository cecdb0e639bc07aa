# SPDX-License-Identifier: Apache-2.0
"""Write the memory of each recipe into its module, and the table of docs/recipes.md: ``make recipes``.

Counting the memory of all recipes takes minutes. ``make recipes ONLY="gemma 2b"`` counts only the recipes that
contain these words, ``ONLY=-`` counts none.
"""

import ast
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.docs.generated import table_of

if TYPE_CHECKING:
    from megatron.bridge.recipes.recipe import Recipe

PART = table_of("recipes.md", "recipes")


def gigabytes(recipe: "Recipe") -> int:
    """GB that the fullest GPU uses, counted on the model that the recipe builds, rounded up."""
    from megatron.bridge.autotune.memory import fullest_stage, memory_per_rank
    from megatron.bridge.recipes.teachers import critic_of, teacher_of

    config = recipe().resolve(recipe.gpus).config
    memory = memory_per_rank(
        config, recipe.gpus, teacher_of(config, recipe.gpus), critic_of(config, recipe.gpus)
    )
    return math.ceil(fullest_stage(memory).total / 1e9)


def write_memory(recipe: "Recipe", memory_gb: int) -> None:
    """Put ``memory_gb`` into the row of ``recipe`` in its module."""
    path = Path(str(sys.modules[recipe.module].__file__))
    path.write_text(with_memory(path.read_text(), recipe.name, memory_gb))


def with_memory(source: str, name: str, memory_gb: int) -> str:
    """Replace the ``memory_gb`` of one recipe in the source text of a module.

    Args:
        source: The text of the module.
        name: The name to which the recipe is assigned.
        memory_gb: The new number of GB.
    """
    value = _memory_argument(ast.parse(source), name)
    assert value.lineno == value.end_lineno, "a number is on one line"
    lines = source.splitlines(keepends=True)
    line = lines[value.lineno - 1].encode()  # ast counts columns in bytes
    before = line[: value.col_offset].decode()
    after = line[value.end_col_offset :].decode()
    lines[value.lineno - 1] = f"{before}{memory_gb}{after}"
    return "".join(lines)


def _memory_argument(module: ast.Module, name: str) -> ast.expr:
    for statement in module.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        if [ast.unparse(target) for target in statement.targets] != [name]:
            continue
        for keyword in statement.value.keywords:
            if keyword.arg == "memory_gb":
                return keyword.value
    raise SystemExit(f"there is no memory_gb to replace in the row of {name}: write memory_gb=0")


def table(counted: dict[str, int] | None = None) -> str:
    """Return a Markdown table with a row for each recipe.

    Args:
        counted: GB of the recipes whose memory was counted after they were imported, by name.
    """
    from megatron.bridge.recipes.catalog import catalog

    memory = {recipe.name: recipe.memory_gb for recipe in catalog().values()}
    memory.update(counted or {})
    lines = [
        "| recipe | training | sequence length | GPUs | memory | layout |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in catalog().values():
        cells = (
            f"`{recipe.name}`",
            recipe.what,
            str(recipe.recommended["seq_length"]),
            f"{recipe.gpus} x {recipe.gpu_kind}",
            f"{memory[recipe.name]} GB",
            recipe.layout,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the modules and the page."""
    from megatron.bridge.recipes.catalog import search

    words = " ".join(sys.argv[1:])
    counted: dict[str, int] = {}
    for recipe in search(words) if words != "-" else ():
        counted[recipe.name] = gigabytes(recipe)
        write_memory(recipe, counted[recipe.name])
    PART.write(table(counted))


if __name__ == "__main__":
    main()
