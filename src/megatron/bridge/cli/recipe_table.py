# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train --list``: all recipes at a glance, without importing torch."""

import re
import sys
from io import StringIO

from rich.console import Console
from rich.table import Table

from megatron.bridge.recipes.catalog import Recipe
from megatron.bridge.recipes.recommended import recommended

COLUMNS = ("recipe", "model", "size", "stage", "GPUs", "GB", "sequence", "precision")

_SIZE = re.compile(r"\b\d[\d.x]*[BM](?:-A[\d.]+B)?(?![\w])")
_PLAIN = 10_000  # columns: a line of a pipe is never cut


def table(recipes: list[Recipe]) -> str:
    """A table in a terminal; plain columns in a pipe, one line a recipe."""
    terminal = sys.stdout.isatty()
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        shown.add_column(column, no_wrap=True, justify="right" if column in ("GB", "sequence") else "left")
    for recipe in recipes:
        shown.add_row(*row(recipe))
    text = StringIO()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else _PLAIN, highlight=False)
    console.print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def row(recipe: Recipe) -> tuple[str, ...]:
    """The cells of one recipe."""
    model, size = model_and_size(recipe.what)
    sequence, precision = (recommended(recipe, option) for option in ("seq_length", "precision"))
    gpus = f"{recipe.gpus} x {recipe.gpu_kind}"
    short = str(precision or "").removesuffix("_mixed").removeprefix("bf16_with_")
    return (recipe.name, model, size, recipe.stage, gpus, str(recipe.memory), str(sequence or ""), short)


def model_and_size(what: str) -> tuple[str, str]:
    """Example.

    >>> model_and_size("Qwen 3 30B-A3B, all weights")
    ('Qwen 3', '30B-A3B')
    >>> model_and_size("DeepSeek-V3 from random weights")
    ('DeepSeek-V3', '')
    """
    found = _SIZE.search(what)
    if found:
        return what[: found.start()].strip(), found[0]
    return re.split(r",| from | in | on ", what)[0].strip(), ""
