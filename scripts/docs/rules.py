# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/command-line.md from the rules: ``python scripts/docs/rules.py``."""

import inspect
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "command-line.md"
START, END = "<!-- table: scripts/docs/rules.py -->\n", "<!-- end of table -->\n"


def table() -> str:
    """A Markdown table with a row for each rule: its name, and why there is one."""
    from megatron.bridge.training.rules import HERE, RULES, SIZES

    lines = ["| rule | why |", "|---|---|"]
    for rule in (*SIZES, *RULES, *HERE):
        why = (inspect.getdoc(rule) or "").partition("\n")[0]
        lines.append(f"| {rule.__name__.replace('_', ' ')} | {why} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
