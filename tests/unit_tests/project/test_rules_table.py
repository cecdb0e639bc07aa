# SPDX-License-Identifier: Apache-2.0
"""The table of rules in the documentation is that of the code."""

from scripts.docs import rules


def test_table_is_current():
    assert rules.PART.is_current(rules.table()), "run `make rules` and commit docs/command-line.md"
