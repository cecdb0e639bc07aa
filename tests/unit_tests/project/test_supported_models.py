# SPDX-License-Identifier: Apache-2.0
"""The table of supported models is the registry's."""

import importlib.util

from tests.families.rows import ROWS
from tests.unit_tests.project.tree import ROOT

# only their text is converted, so they have tests of their own: tests/unit_tests/models/test_mistral3.py
TEXT_PARTS = {"Mistral3ForConditionalGeneration"}


def script():
    path = ROOT / "scripts" / "docs" / "supported_models.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_is_current():
    made = script()
    assert made.page(made.PAGE.read_text()) == made.PAGE.read_text(), "run `make models` and commit docs/models.md"


def test_every_architecture_has_a_row_in_the_family_test():
    from megatron.bridge import AutoBridge

    assert set(AutoBridge.list_supported_models()) - {row.model for row in ROWS.values()} == TEXT_PARTS
