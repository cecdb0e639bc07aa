# SPDX-License-Identifier: Apache-2.0
"""The argument parser of every subcommand and script, and options from tables."""

import argparse
import re
from pathlib import Path
from typing import Any

MOST = 1 << 20  # processes, which layouts and reports count one by one
MOST_WORKERS = 1024


class HelpFormatter(argparse.HelpFormatter):
    """Wraps a paragraph to the terminal and keeps the line breaks of several lines, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        if len(lines) == 1:
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in lines)


class Parser(argparse.ArgumentParser):
    """Takes options by their full names only; parsers of subcommands are of this class, too."""

    def __init__(self, *, formatter_class: Any = HelpFormatter, **options: Any) -> None:
        super().__init__(formatter_class=formatter_class, allow_abbrev=False, **options)
        self.register("type", Path, _path)


def count(text: str) -> int:
    """The ``type`` of an option that takes a number of processes, steps or samples."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MOST):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {MOST}")
    return int(text)


def workers(text: str) -> int:
    """The ``type`` of an option that takes a number of worker processes on this machine."""
    if count(text) > MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MOST_WORKERS}, too many processes for one machine")
    return int(text)


def _path(text: str) -> Path:
    """Refuse an empty path: ``--output "$OUT"`` with OUT unset would mean the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: is a variable of the shell not set?")
    return Path(text)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def memory_size(text: str) -> int:
    """The ``type`` of an option that takes bytes, such as ``4GB`` or ``512M``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 4GB or 512MB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


TYPES = {"int": int, "float": float, "path": Path, "count": count, "workers": workers, "memory_size": memory_size}


def add_options(parser: Any, table: dict[str, Any]) -> None:
    """Add the options of a YAML table, by their names; ``one of`` and ``group TITLE`` hold options of their own."""
    for name, row in table.items():
        if name == "one of":
            add_options(parser.add_mutually_exclusive_group(), row)
        elif name.startswith("group "):
            add_options(parser.add_argument_group(name.removeprefix("group ")), row)
        else:
            named = {"type": TYPES[row["type"]]} if "type" in row else {}
            if row.get("action") == "toggle":
                named["action"] = argparse.BooleanOptionalAction
            parser.add_argument(*name.split(), **row | named)
