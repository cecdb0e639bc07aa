# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train --list``: a table of recipes, without importing torch."""

import re
import sys
from io import StringIO

from rich.console import Console
from rich.table import Table

from megatron.bridge.recipes.recipe import Recipe

COLUMNS = ("recipe", "model", "size", "stage", "GPUs", "GB", "sequence", "precision")

_SIZE = re.compile(r"[AE]?\d[\d.x]*[BMT](-A[\d.]+[BM])?")
_STAGE = re.compile(r" (?:pretraining|full fine-tuning|distilled|DPO|GRPO)\b")
_PLAIN = 10_000  # columns: no line is truncated in a pipe


def table(recipes: list[Recipe]) -> str:
    """One line per recipe, colored in a terminal."""
    terminal = sys.stdout.isatty()
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        shown.add_column(
            column, no_wrap=True, justify="right" if column in ("GB", "sequence") else "left"
        )
    for recipe in recipes:
        shown.add_row(*row(recipe))
    text = StringIO()
    console = Console(
        file=text, force_terminal=terminal, width=None if terminal else _PLAIN, highlight=False
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def row(recipe: Recipe) -> tuple[str, ...]:
    model, size = model_and_size(recipe.what)
    gpus = f"{recipe.gpus} x {recipe.gpu_kind}"
    memory = str(recipe.memory_gb)
    seq_length = str(recipe.recommended["seq_length"])
    precision = recipe.recommended["precision"].removesuffix("_mixed").removeprefix("bf16_with_")
    return (recipe.name, model, size, recipe.stage, gpus, memory, seq_length, precision)


def model_and_size(what: str) -> tuple[str, str]:
    """Split what a recipe trains.

    Example:
        >>> model_and_size("Nemotron Nano 9B v2 full fine-tuning")
        ('Nemotron Nano v2', '9B')
    """
    words = _STAGE.split(what)[0].split()
    size = next((word for word in words if _SIZE.fullmatch(word)), "")
    return " ".join(word for word in words if word != size), size
