# SPDX-License-Identifier: Apache-2.0
"""Write the tables of HTML pages."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose cells show the text of ``head`` and ``rows``, not as markup."""
    lines = [_row("th", head)]
    lines += [_row("td", row) for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
