# SPDX-License-Identifier: Apache-2.0
"""The terminal: one rich console on standard error, silent on all ranks but the first."""

import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from megatron.bridge.utils.storage_paths import shown

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 80


@cache
def console() -> "Console":
    """Return the shared console; on ranks above 0 it prints nothing."""
    from rich.console import Console  # imports for 0.1 s of CPU time

    class Terminal(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(
                *(shown(item) if isinstance(item, str) else item for item in objects), **options
            )

    is_first_rank = os.environ.get("RANK", "0") == "0"
    return ensure_width(
        Terminal(stderr=True, quiet=not is_first_rank, highlight=False, soft_wrap=True)
    )


def print_rank_0(text: str) -> None:
    console().print(text, markup=False)


def ensure_width(rich_console: "Console") -> "Console":
    """Set the width of the console if ``COLUMNS`` is 0, for which rich prints nothing."""
    if not rich_console.width:
        rich_console.width = _WIDTH
    return rich_console


def track[T](
    items: Iterable[T], description: str, total: int | None = None, show: bool = True
) -> Iterator[T]:
    """Yield ``items`` with a progress bar and the remaining time; print one plain line if not in a terminal."""
    terminal = console()
    if not show or terminal.quiet:
        yield from items
        return
    if not terminal.is_terminal:
        count = 0
        for count, item in enumerate(items, start=1):  # noqa: B007 - the last count is printed
            yield item
        terminal.print(f"{description}: {count} done")
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=terminal,
    ) as progress:
        yield from progress.track(items, description=description, total=total)
