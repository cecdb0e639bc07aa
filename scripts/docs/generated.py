# SPDX-License-Identifier: Apache-2.0
"""Pages with a part that a script writes: everything between a start mark and an end mark."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class GeneratedPart:
    """The generated part of one page."""

    page: Path
    """The Markdown file."""
    start: str
    """The line above the part."""
    end: str
    """The line below it."""

    def replaced(self, body: str) -> str:
        """The text of the page with ``body`` as its generated part."""
        before, start, rest = self.page.read_text().partition(self.start)
        assert start, f"{self.page} has no line {self.start}"
        return before + start + body + self.end + rest.partition(self.end)[2]

    def is_current(self, body: str) -> bool:
        """Whether the page already has ``body``."""
        return self.replaced(body) == self.page.read_text()

    def write(self, body: str) -> None:
        """Put ``body`` into the page."""
        self.page.write_text(self.replaced(body))


def table_of(page: str, target: str) -> GeneratedPart:
    """The table of a page in ``docs``, written by ``make target``."""
    return GeneratedPart(
        ROOT / "docs" / page, f"<!-- table: make {target} -->\n", "<!-- end of table -->\n"
    )
