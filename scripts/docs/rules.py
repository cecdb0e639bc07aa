# SPDX-License-Identifier: Apache-2.0
"""Write the table of rules into docs/command-line.md: ``make rules``."""

import inspect

from scripts.docs.generated import table_of

PART = table_of("command-line.md", "rules")


def table() -> str:
    """A Markdown table with a row for each rule: its name, and why there is one."""
    from megatron.bridge.training.config.rules import LOCAL_RULES, RULES, SIZE_RULES

    lines = ["| rule | why |", "|---|---|"]
    for rule in (*SIZE_RULES, *RULES, *LOCAL_RULES):
        why = (inspect.getdoc(rule) or "").partition("\n")[0]
        lines.append(f"| {rule.__name__.replace('_', ' ')} | {why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PART.write(table())
