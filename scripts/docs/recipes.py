# SPDX-License-Identifier: Apache-2.0
"""Write the memory of each recipe into the catalog, and the table of docs/recipes.md: ``make recipes``.

Counting the memory of all recipes takes minutes. ``make recipes ONLY="gemma 2b"`` counts only the recipes that
contain these words, ``ONLY=-`` counts none.
"""

import math
import re
import sys
from typing import TYPE_CHECKING

from scripts.docs.generated import ROOT, table_of

if TYPE_CHECKING:
    from megatron.bridge.recipes.catalog import Recipe

PART = table_of("recipes.md", "recipes")


def gigabytes(recipe: "Recipe") -> int:
    """GB that the fullest GPU uses, counted on the model that the recipe builds, rounded up."""
    from megatron.bridge.autotune.memory import fullest_stage, memory_per_rank
    from megatron.bridge.recipes.teachers import teacher_of

    config = recipe.build()
    config = config.resolve(recipe.gpus).config
    memory = memory_per_rank(config, recipe.gpus, teacher_of(config, recipe.gpus))
    return math.ceil(fullest_stage(memory).total / 1e9)


def write_memory(recipe: "Recipe") -> None:
    """Put the memory into the row of ``recipe``."""
    path = ROOT / "src/megatron/bridge/recipes/catalog.yaml"
    row = re.compile(rf"(^  {recipe.name}: .*: )\d+( GB)", re.MULTILINE)
    path.write_text(row.sub(rf"\g<1>{gigabytes(recipe)}\g<2>", path.read_text()))


def table() -> str:
    """A Markdown table with a row for each recipe."""
    from megatron.bridge.recipes.catalog import catalog

    lines = [
        "| recipe | training | sequence length | GPUs | memory | layout |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in catalog().values():
        length = recipe.build().dataset.seq_length
        gpus = f"{recipe.gpus} x {recipe.gpu_kind}"
        cells = (
            f"`{recipe.name}`",
            recipe.what,
            str(length),
            gpus,
            f"{recipe.memory} GB",
            recipe.layout,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the catalog and the page."""
    from megatron.bridge.recipes.catalog import catalog, search

    words = " ".join(sys.argv[1:])
    for recipe in search(words) if words != "-" else ():
        write_memory(recipe)
    catalog.cache_clear()
    PART.write(table())


if __name__ == "__main__":
    main()
