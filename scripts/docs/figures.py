# SPDX-License-Identifier: Apache-2.0
"""Write the table of what has been measured into README.md and docs/index.md: ``make figures``.

The rows are in docs/figures.tsv, with links as in a page of ``docs``, so a figure of the front page is in one place.
"""

import csv
import re

from scripts.docs.generated import ROOT, GeneratedPart, table_of

SOURCE = ROOT / "docs/figures.tsv"
DOCS_INDEX = table_of("index.md", "figures")
README = GeneratedPart(ROOT / "README.md", DOCS_INDEX.start, DOCS_INDEX.end)

_LINK = re.compile(r"\]\((?!https?:)")


def table() -> str:
    """Return the Markdown table for a page in ``docs``."""
    with SOURCE.open(newline="") as file:
        head, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|---|---|---|")
    return "\n".join(lines) + "\n"


def table_of_readme() -> str:
    """Return the same table with links from the root of the repository."""
    return _LINK.sub("](docs/", table())


if __name__ == "__main__":
    DOCS_INDEX.write(table())
    README.write(table_of_readme())
