# SPDX-License-Identifier: Apache-2.0
"""Pretraining recipes for which the tuner predicts a faster layout: ``python -m benchmarks recipe_layouts``.

The tuner may use 94 % of a GPU's memory. Of the layouts within 4 % of the fastest one, the simplest is taken: without
recomputation, context parallelism, uneven stages and virtual stages, if possible. A Markdown row is printed for each
recipe whose own layout is predicted to be at least ``--least`` percent slower. All recipes take 20 minutes of a CPU.
"""

import argparse
import sys

from megatron.bridge.autotune.gpus import gpu
from megatron.bridge.autotune.search.price import Price
from megatron.bridge.autotune.search.search import Search, candidate_of
from megatron.bridge.recipes.catalog import catalog

MEMORY = 0.94
NEAR = 1.04
MANY = 400  # layouts from which the simplest is taken; the search simulates fewer
_RECOMPUTED = {None: 0.0, "selective": 1.0, "full": 3.0}


def main() -> None:
    parser = argparse.ArgumentParser(description="Layouts of recipes against the tuner's.")
    parser.add_argument("recipes", nargs="*", help="names (default: all of pretraining)")
    parser.add_argument("--least", type=float, default=10.0, help="percent (default: 10)")
    args = parser.parse_args()
    print("| recipe | GPUs | its layout | the tuner's | it is slower by |\n|---|---|---|---|---|")
    for name, recipe in catalog().items():
        if recipe.stage != "pretrain" or (args.recipes and name not in args.recipes):
            continue
        config = recipe().resolve(recipe.gpus).config
        budget = int(MEMORY * gpu(recipe.gpu_kind).memory)
        search = Search(config, recipe.gpus, recipe.gpu_kind, budget, switches=False)
        own = search.price(candidate_of(config))
        best = search.run(MANY).best
        if own is None or not best:
            print(f"| {name} | no layout fits |")
            continue
        simplest = min(
            (price for price in best if price.seconds <= NEAR * best[0].seconds), key=complexity
        )
        slower = own.seconds / simplest.seconds - 1
        if 100 * slower >= args.least:
            print(
                f"| `{name}` | {recipe.gpus} {recipe.gpu_kind} | {own.candidate.label()} | "
                f"{simplest.candidate.label()} | {slower:.0%} |",
                flush=True,
            )


def complexity(price: Price) -> tuple[float, float]:
    """Return a number that grows with what a reader must understand of a layout, and its time."""
    candidate = price.candidate
    number = _RECOMPUTED[candidate.recompute[0]]
    number += 2.0 * (candidate.context > 1)
    number += 1.0 * (candidate.pipeline > 1)
    number += 0.5 * (candidate.virtual > 1)
    number += 1.0 * (candidate.layout is not None)
    number += 0.25 * (candidate.tensor > 1)
    return number, price.seconds


if __name__ == "__main__":
    sys.exit(main())
