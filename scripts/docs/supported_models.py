# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/models.md from the registry of bridges: ``make models``."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table: make models -->\n", "<!-- end of table -->\n"


def table() -> str:
    """A Markdown table with a row for each architecture: what it is, and what is tested of it."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import _REGISTRY

    published, layouts = _published(), _layouts()
    lines = ["| architecture | models | layouts tested | published configs checked |", "|---|---|---|---|"]
    for name in AutoBridge.list_supported_models():
        about = (sys.modules[_REGISTRY[name].bridge.__module__].__doc__ or "").strip().rstrip(".")
        cells = (f"`{name}`", about, " ".join(layouts.get(name, ())), ", ".join(published.get(name, ())))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _published() -> dict[str, list[str]]:
    """Architecture -> published models whose config.json is in the tests."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests" / "families" / "published").glob("*.json")):
        (architecture,) = json.loads(path.read_text())["architectures"]
        found.setdefault(architecture, []).append(path.stem.partition("--")[2])
    return found


def _layouts() -> dict[str, list[str]]:
    """Architecture -> layouts that its rows run under, beside one process."""
    from tests.families.harness import LAYOUTS
    from tests.families.rows import ROWS

    found: dict[str, set[str]] = {}
    for row in ROWS.values():
        found.setdefault(row.model, set()).update(row.layouts, row.four)
    return {name: [layout for layout in LAYOUTS if layout in used] for name, used in found.items()}


def page(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END)[1]


def main() -> None:
    """Write the page."""
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
