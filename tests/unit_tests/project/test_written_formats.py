# SPDX-License-Identifier: Apache-2.0
"""The table of formats is what the code writes."""

from scripts.docs import written_formats


def test_table_is_current():
    assert written_formats.PART.is_current(written_formats.table()), (
        "run `make formats` and commit docs/low-precision.md"
    )
