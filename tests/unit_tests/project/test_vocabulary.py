# SPDX-License-Identifier: Apache-2.0
"""The tables of blocks, fields and settings are those of the code."""

from scripts.docs import vocabulary


def test_tables_are_current():
    assert vocabulary.PART.is_current(vocabulary.table()), (
        "run `make vocabulary` and commit docs/adding-a-family.md"
    )


def test_known_rows():
    text = vocabulary.table()
    assert (
        "| `mlp(layers, norm, names, gated, fused, projections, turned)` | Feed-forward layer and"
        in text
    )
    assert "| `WINDOWS` | `sliding_window`, `layer_types` | Window in the layers that" in text
    assert "| `norm_placement` | " in text
