# SPDX-License-Identifier: Apache-2.0
"""docs/parity.md shows the matrix of ``tests/parity.py``, all of it, within its tolerances."""

import importlib.util
from pathlib import Path

from tests import parity

ROOT = Path(__file__).resolve().parents[3]
SAY = "run `make parity` and commit docs/parity.md"


def script():
    spec = importlib.util.spec_from_file_location("parity_page", ROOT / "scripts" / "docs" / "parity.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_cell_and_no_other():
    module = script()
    text = module.PAGE.read_text()
    rows = module.known_rows(text)
    assert rows.keys() == set(parity.cells()), SAY
    assert module.page(text, rows) == text, SAY


def test_the_figures_are_within_the_tolerances():
    module = script()
    for (model, _), line in module.known_rows(module.PAGE.read_text()).items():
        figures = parity.Figures(*map(float, line.split("|")[3:8]))
        assert not figures.beyond(parity.MODELS[model].tolerance), line


def test_the_matrix_is_as_large_as_promised():
    assert len(set(parity.cells())) == len(parity.cells()) >= 24
    assert {layout for _, layout in parity.cells()} == parity.LAYOUTS.keys()
    assert parity.CELLS.keys() == parity.MODELS.keys()
