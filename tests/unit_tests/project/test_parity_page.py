# SPDX-License-Identifier: Apache-2.0
"""docs/parity.md shows the matrix of ``tests/parity.py``, all of it, within its tolerances."""

from scripts.docs import parity as parity_page
from tests import parity

HINT = "run `make parity` and commit docs/parity.md"


def rows():
    return parity_page.known_rows(parity_page.PART.page.read_text())


def test_the_page_has_every_cell_and_no_other():
    assert rows().keys() == set(parity.cells()), HINT
    assert parity_page.PART.is_current(parity_page.tables(rows())), HINT


def test_the_figures_are_within_the_tolerances():
    for (model, _), line in rows().items():
        figures = parity.Figures(*map(float, line.split("|")[3:8]))
        assert not figures.beyond(parity.MODELS[model].tolerance), line


def test_the_matrix_is_as_large_as_promised():
    assert len(set(parity.cells())) == len(parity.cells()) >= 24
    assert {layout for _, layout in parity.cells()} == parity.LAYOUTS.keys()
    assert parity.CELLS.keys() == parity.MODELS.keys()
