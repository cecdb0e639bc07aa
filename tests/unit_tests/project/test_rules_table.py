# SPDX-License-Identifier: Apache-2.0
"""The table of rules in the documentation is that of the code."""

import importlib.util

from tests.unit_tests.project.tree import ROOT


def test_table_is_current():
    spec = importlib.util.spec_from_file_location("rules_table", ROOT / "scripts" / "docs" / "rules.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run `python scripts/docs/rules.py` and commit docs/command-line.md"
