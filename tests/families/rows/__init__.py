# SPDX-License-Identifier: Apache-2.0
"""The rows of all families: every module of this folder has a list ``ROWS``."""

import importlib
import pkgutil

from tests.families.row import Row


def _collect() -> dict[str, Row]:
    modules = [
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    ]
    rows = [row for module in modules for row in module.ROWS]
    found = {row.name: row for row in rows}
    assert len(found) == len(rows), "two rows have the same name"
    return found


ROWS = _collect()
ONE_FOR_EACH = {row.model: row for row in reversed(ROWS.values())}
"""The first row of each architecture."""
