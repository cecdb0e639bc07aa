# SPDX-License-Identifier: Apache-2.0
"""Write what follows from the recipes: ``make recipes``.

That is the memory in each docstring, the names in ``recipes/<family>/__init__.py``, and the table of
docs/recipes.md. Counting the memory of all takes minutes; ``make recipes ONLY="gemma 2b"`` counts that of the
recipes with these words, ``ONLY=-`` of none.
"""

import math
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.bridge.recipes.catalog import Recipe

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "recipes.md"
START, END = "<!-- table: make recipes -->\n", "<!-- end of table -->\n"


def gigabytes(recipe: "Recipe") -> int:
    """GB of the fullest GPU, counted on the model that the recipe builds, rounded up."""
    from megatron.bridge.autotune.memory import fullest, memory_per_rank
    from megatron.bridge.recipes.teachers import teacher_of

    config = recipe.build()
    config.validate(recipe.gpus)
    memory = memory_per_rank(config, recipe.gpus, teacher_of(config, recipe.gpus))
    return math.ceil(fullest(memory).total / 1e9)


def write_memory(recipe: "Recipe") -> None:
    """Put the memory into the docstring of ``recipe``."""
    path = SOURCE / f"{recipe.module.replace('.', '/')}.py"
    docstring = re.compile(rf'(def {recipe.name}\(.*?"""[^\n]*: )\d+( GB)', re.DOTALL)
    path.write_text(docstring.sub(rf"\g<1>{gigabytes(recipe)}\g<2>", path.read_text(), count=1))


def write_package(package: str, recipes: "list[Recipe]") -> Path:
    """Name the recipes of a family in its ``__init__.py``, whose docstring stays."""
    path = SOURCE / package.replace(".", "/") / "__init__.py"
    lines = path.read_text().split("\n")[:2]
    for module, members in groupby(recipes, key=lambda recipe: recipe.module):
        lines.append(f"from {module} import {', '.join(recipe.name for recipe in members)}")
    path.write_text("\n".join([*lines, f"__all__ = {[recipe.name for recipe in recipes]}", ""]))
    return path


def table() -> str:
    """A Markdown table with a row for each recipe."""
    from megatron.bridge.recipes.catalog import catalog

    lines = ["| recipe | trains | tokens | GPUs | memory | layout |", "|---|---|---|---|---|---|"]
    for recipe in catalog().values():
        length = recipe.build().dataset.seq_length
        gpus = f"{recipe.gpus} x {recipe.gpu_kind}"
        cells = (f"`{recipe.name}`", recipe.what, str(length), gpus, f"{recipe.memory} GB", recipe.why)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END)[1]


def main() -> None:
    """Write the docstrings, the packages and the page."""
    from megatron.bridge.recipes.catalog import catalog, search

    words = " ".join(sys.argv[1:])
    for recipe in search(words) if words != "-" else ():
        write_memory(recipe)
    catalog.cache_clear()
    by_module = sorted(catalog().values(), key=lambda recipe: recipe.module)
    by_package = groupby(by_module, key=lambda recipe: recipe.module.rpartition(".")[0])
    packages = [write_package(package, list(recipes)) for package, recipes in by_package]
    for command in (["format", "--quiet"], ["check", "--quiet", "--fix"], ["format", "--quiet"]):
        subprocess.run([Path(sys.executable).with_name("ruff"), *command, *packages], check=True)
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
