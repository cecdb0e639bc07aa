# SPDX-License-Identifier: Apache-2.0
"""How subcommands print sizes, counts and shapes."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.utils import storage
from megatron.bridge.utils.atomic import refuse_unwritable, write_text
from megatron.bridge.utils.storage_paths import shown, url_of

if TYPE_CHECKING:
    from rich.console import Console

_UNITS = (1e9, "GB"), (1e6, "MB"), (1e3, "kB")
_WIDTH = 200  # of output that is not a terminal: names stay on one line


def size(count: float) -> str:
    """Bytes in decimal units.

    Example:
        >>> size(994_464)
        '994.5 kB'
    """
    return next(
        (f"{count / step:.1f} {unit}" for step, unit in _UNITS if count >= step), f"{count:.0f} B"
    )


def folder_size(folder: Path) -> int:
    if url_of(folder) is not None:
        return sum(entry.size for entry in storage.listing(folder, deep=True).values())
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def many(count: int, noun: str, ending: str = "s") -> str:
    """A count with its noun.

    Example:
        >>> many(1, "file"), many(2, "file")
        ('1 file', '2 files')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else ending)


def shape(sizes: Iterable[int]) -> str:
    """The shape of a tensor.

    Example:
        >>> shape((2, 3)), shape(())
        ('2x3', 'scalar')
    """
    return "x".join(map(str, sizes)) or "scalar"


def say(text: str) -> None:
    """Print to standard output at once, on every rank."""
    sys.stdout.write(shown(text) + "\n")
    sys.stdout.flush()


def write_file(option: str, path: Path, text: str) -> None:
    """Write the file that the user named with ``option``."""
    with refuse_unwritable(f"{option} {path}", "choose another file"):
        write_text(path, text)


def table_console() -> "Console":
    """A console for tables on standard output, wide enough for full names in a pipe."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH)


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows as lines; all columns except the last one are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield "  ".join([*cells, row[-1]]).rstrip()
