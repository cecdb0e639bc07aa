# SPDX-License-Identifier: Apache-2.0
"""Run the matrix of ``tests/parity.py`` and write its figures into docs/parity.md: ``make parity``.

``make parity ONLY="packed experts"`` runs the models and layouts whose names contain one of these words and keeps
the other figures. The page is written after each cell. The exit code is 1 if a figure is beyond its tolerance.
"""

import re
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from scripts.docs.generated import ROOT, GeneratedPart

if TYPE_CHECKING:
    from tests.parity import Figures

PART = GeneratedPart(
    ROOT / "docs/parity.md", "<!-- figures: make parity -->\n", "<!-- end of figures -->\n"
)
HEAD = "| layout | processes | losses | held-out losses | further losses | gradient norms | weights | measured |"
Cell = tuple[str, str]


def row(layout: str, processes: int, figures: "Figures", day: str) -> str:
    """A row of the table of a model."""
    values = [f"{value:.1e}" if value else "0" for value in asdict(figures).values()]
    return f"| {' | '.join([layout, str(processes), *values, day])} |"


def known_rows(text: str) -> dict[Cell, str]:
    """The rows of the page, by model and layout."""
    rows: dict[Cell, str] = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        for line in re.findall(r"^\| .* \|$", section, flags=re.MULTILINE):
            if line != HEAD:
                rows[section.partition("\n")[0], line.split("|")[1].strip()] = line
    return rows


def tables(rows: dict[Cell, str]) -> str:
    """One section per model, with its tolerance and a table."""
    from tests.parity import CELLS, MODELS

    lines = [
        f"{sum(map(len, CELLS.values()))} cells: {len(CELLS)} models, each under the layouts that concern it.",
        "",
    ]
    for model, layouts in CELLS.items():
        limits = ", ".join(
            f"{name.replace('_', ' ')} {value:.1e}"
            for name, value in asdict(MODELS[model].tolerance).items()
        )
        lines += [
            f"### {model}",
            "",
            f"Tolerance: {limits}.",
            "",
            HEAD,
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [rows[model, layout] for layout in layouts if (model, layout) in rows]
        lines.append("")
    return "\n".join(lines)


def measure(words: list[str], rows: dict[Cell, str]) -> list[Cell]:
    """Measure the cells that contain one of the words, or all cells, and write them into ``rows`` and the page.

    Returns:
        The cells that are beyond their tolerance.
    """
    from tests import parity
    from tests.toy_samples import write_samples
    from tests.workers import Processes, WorkerPool

    folder = write_samples(tempfile.mkdtemp())
    singles, processes = parity.Singles(folder), Processes()
    pools = {size: WorkerPool(size, processes) for size in (2, 4)}
    day, beyond = f"{datetime.now(UTC):%Y-%m-%d}", []
    for model, layout in parity.cells():
        if words and not any(word in name for name in (model, layout) for word in words):
            continue
        size = parity.LAYOUTS[layout].processes
        figures = parity.measure(pools[size], singles, model, layout, folder)
        rows[model, layout] = row(layout, size, figures, day)
        PART.write(tables(rows))  # after each cell, so that an interrupted run keeps its figures
        sys.stderr.write(f"{model}: {rows[model, layout]}\n")
        if figures.beyond(parity.MODELS[model].tolerance):
            beyond.append((model, layout))
    processes.close()
    singles.close()
    return beyond


def main() -> None:
    """Measure, and report what is beyond its tolerance."""
    beyond = measure(sys.argv[1:], known_rows(PART.page.read_text()))
    if beyond:
        sys.exit(f"beyond their tolerance: {beyond}")


if __name__ == "__main__":
    main()
