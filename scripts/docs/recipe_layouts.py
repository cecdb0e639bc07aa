# SPDX-License-Identifier: Apache-2.0
"""Compare the layout of each recipe with the best one that the tuner finds for its GPUs.

python -m scripts.docs.recipe_layouts layouts.jsonl [words]

Appends a line for each recipe that has several GPUs and is not in the file yet; hours for all of them.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.recipes.recipe import Recipe


def compare(recipe: "Recipe") -> dict[str, Any]:
    """Seconds of a step of ``recipe`` as it is, and in the fastest layout that fits."""
    from megatron.bridge.autotune.search.search import Search

    config = recipe().resolve(recipe.gpus).config
    search = Search(config, recipe.gpus, recipe.gpu_kind, switches=False)
    current, found = search.price(search.current), search.run(5)
    assert current is not None, "a recipe's layout is always possible"
    best = found.best[0] if found.best else current
    return {
        "recipe": recipe.name,
        "gpus": f"{recipe.gpus} x {recipe.gpu_kind}",
        "layout": search.current.label(),
        "seconds": current.seconds,
        "best": best.candidate.label(),
        "best_seconds": best.seconds,
    }


def main() -> None:
    from megatron.bridge.recipes.catalog import search

    path = Path(sys.argv[1])
    done = (
        {json.loads(line)["recipe"] for line in path.read_text().splitlines()}
        if path.exists()
        else set[str]()
    )
    for recipe in search(" ".join(sys.argv[2:])):
        if recipe.gpus == 1 or recipe.name in done:
            continue
        try:
            row = compare(recipe)
        except Exception as error:  # the others are still worth having
            row = {"recipe": recipe.name, "error": str(error)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
