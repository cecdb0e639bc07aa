# SPDX-License-Identifier: Apache-2.0
"""The figures of the front pages are those of docs/figures.tsv."""

import pytest

from scripts.docs import figures


@pytest.mark.parametrize(
    ("part", "body"),
    [(figures.DOCS_INDEX, figures.table()), (figures.README, figures.table_of_readme())],
    ids=["docs/index.md", "README.md"],
)
def test_table_is_current(part, body):
    assert part.is_current(body), "run `make figures` and commit README.md and docs/index.md"
