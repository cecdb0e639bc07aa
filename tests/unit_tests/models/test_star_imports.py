# SPDX-License-Identifier: Apache-2.0
"""`from families import *` replaces no name that a bridge imports itself."""

import ast
from importlib import import_module

import pytest

from tests.unit_tests.project.tree import ROOT

SOURCE = ROOT / "src"
WITH_STARS = sorted(
    path
    for path in (SOURCE / "megatron/bridge/models").rglob("*.py")
    if " import *" in path.read_text()
)


@pytest.mark.parametrize("path", WITH_STARS, ids=lambda path: path.stem)
def test_imported_names_are_what_they_were_imported_as(path):
    module = import_module(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            origin = import_module(node.module)
            for name in (
                alias for alias in node.names if alias.name != "*" and hasattr(origin, alias.name)
            ):
                assert getattr(module, name.asname or name.name) is getattr(origin, name.name), (
                    name.name
                )
