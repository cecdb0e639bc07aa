# SPDX-License-Identifier: Apache-2.0
"""Words and numbers as every command writes them."""

import argparse
from pathlib import Path
from typing import Any

_UNITS = (1e9, "GB"), (1e6, "MB"), (1e3, "kB")


class HelpFormatter(argparse.HelpFormatter):
    """Wraps a paragraph to the terminal; lines that were broken by hand, such as examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        if len(lines) == 1:
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in lines)


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names; the parsers of subcommands are of this kind, too."""

    def __init__(self, *, formatter_class: Any = HelpFormatter, **options: Any) -> None:
        super().__init__(formatter_class=formatter_class, allow_abbrev=False, **options)
        self.register("type", Path, _path)


def _path(text: str) -> Path:
    """``--output "$OUT"`` without such a variable would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: is a variable of the shell not set?")
    return Path(text)


def size(count: float) -> str:
    """Bytes in units of ten.

    Example:
        >>> size(994_464)
        '994.5 kB'
    """
    return next((f"{count / step:.1f} {unit}" for step, unit in _UNITS if count >= step), f"{count:.0f} B")


def many(count: int, what: str, ending: str = "s") -> str:
    """A number of things.

    Example:
        >>> many(1, "file"), many(2, "file")
        ('1 file', '2 files')
    """
    return f"{count:,} {what}" + ("" if count == 1 else ending)
