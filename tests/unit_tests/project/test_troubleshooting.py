# SPDX-License-Identifier: Apache-2.0
"""Every message that docs/troubleshooting.md explains is one that the source can say."""

import ast
import re
from functools import cache

import pytest

from megatron.bridge.training.config.rules.related_settings import REQUIREMENTS
from tests.unit_tests.project.tree import ROOT, tracked

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
HEADINGS = re.findall(r"^### (.+)$", PAGE, flags=re.MULTILINE)


def literal(node):
    """A string of the source, with ``…`` for each value in it; None for another node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "…" for part in node.values)
    return None


@cache
def sentences():
    """All strings of the package, docstrings left out, one a line; a message may be made of the rows of a table."""
    found = {
        line
        for path in tracked("src/megatron/bridge/*.yaml")
        for line in path.read_text().splitlines()
    }
    found |= {
        f"{row.when} needs {'; '.join(map(str, row.needs))}: {row.remedy}" for row in REQUIREMENTS
    }
    for path in tracked("src/megatron/bridge/*.py"):
        tree = ast.parse(path.read_text())
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found |= {literal(node) for node in ast.walk(tree) if id(node) not in said}
    return "\n".join(text.replace("\n", " ") for text in found if text)


def pattern(heading):
    """What a heading quotes; a value, written as ``…``, stands for anything in one string."""
    parts = [part.strip() for part in re.split("…", heading.strip("`"))]
    return ".*".join(re.escape(part) for part in parts if part)


@pytest.mark.parametrize("heading", HEADINGS)
def test_message_is_in_the_source(heading):
    assert re.search(pattern(heading), sentences())


def test_headings_are_many_and_quote_enough_to_be_found():
    assert len(HEADINGS) >= 30
    assert [heading for heading in HEADINGS if len(heading.replace("…", "").strip("` ")) < 12] == []
