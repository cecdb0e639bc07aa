# SPDX-License-Identifier: Apache-2.0
"""The argument parser of every subcommand and script."""

import argparse
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
