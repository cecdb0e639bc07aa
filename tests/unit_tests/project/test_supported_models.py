# SPDX-License-Identifier: Apache-2.0
"""The table of supported models is the registry's."""

import importlib.util

from tests.families.rows import ROWS
from tests.unit_tests.project.tree import ROOT, tracked

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


def test_a_family_is_short():
    """At most 40 lines, 90 with experts or latent attention; what is more belongs to a shared block."""
    files = [
        path for path in tracked("src/megatron/bridge/models/*/*_bridge.py") if "conversion" not in path.parts
    ]
    assert files
    text = {path.name: path.read_text() for path in files}
    limits = {name: 90 if "expert" in body or "latent" in body else 40 for name, body in text.items()}
    assert [name for name, body in text.items() if len(body.splitlines()) > limits[name]] == []
