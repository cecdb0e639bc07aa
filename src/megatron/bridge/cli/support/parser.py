# SPDX-License-Identifier: Apache-2.0
"""The argument parser of every subcommand and script."""

import argparse
from pathlib import Path
from typing import Any

type Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


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
    """The ``type`` of an option that takes a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def _path(text: str) -> Path:
    """Refuse an empty path: ``--output "$OUT"`` with OUT unset would mean the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: is a variable of the shell not set?")
    return Path(text)
