# SPDX-License-Identifier: Apache-2.0
"""The argument parser of every subcommand and script, and options from tables; ``parser.yaml`` has shared ones."""

import argparse
import re
from pathlib import Path
from typing import Any

from megatron.bridge.utils.config import yaml_text

SHARED = yaml_text.tables_beside(__file__)

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
        raise argparse.ArgumentTypeError(
            f"{text} is more than {MOST_WORKERS}, too many processes for one machine"
        )
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


class _NamedPaths(argparse.Action):
    """Collects ``name=path``."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        name, _, path = values.partition("=")
        found = dict(getattr(namespace, self.dest) or {})
        if not name or not path or name in found:
            parser.error(f"{option_string} {values}: give NAME=DIR, each name once")
        setattr(namespace, self.dest, {**found, name: path})


class _Refused(argparse.Action):
    """Ends the command with the reason why it does not support an argument of another program."""

    def __init__(self, reason: str, **names: Any) -> None:
        super().__init__(nargs="*", const=reason, help=argparse.SUPPRESS, **names)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"{self.option_strings[0]} is not supported: {self.const}")


_BY_NAME: dict[str, dict[str, Any]] = {
    "type": {
        "int": int,
        "float": float,
        "path": Path,
        "count": count,
        "workers": workers,
        "memory_size": memory_size,
    },
    "action": {
        "toggle": argparse.BooleanOptionalAction,
        "named_paths": _NamedPaths,
        "refused": _Refused,
    },
}
"""The types and actions that tables name, in addition to argparse's own actions."""


def add_options(parser: Any, table: dict[str, Any]) -> None:
    """Add the options of a YAML table, by their names.

    ``group TITLE``, ``one of`` and ``exactly one of`` hold options of their own, ``shared NAME`` stands for a table of
    ``parser.yaml`` with changes, and ``defaults`` are values of names.
    """
    for name, row in table.items():
        kind, _, title = name.partition(" ")
        if name == "defaults":
            parser.set_defaults(**row)
        elif kind == "shared":
            add_shared(parser, title, row)
        elif kind == "group":
            add_options(parser.add_argument_group(title), row)
        elif name in ("one of", "exactly one of"):
            add_options(parser.add_mutually_exclusive_group(required=name != "one of"), row)
        else:
            known = {
                key: values[row[key]] for key, values in _BY_NAME.items() if row.get(key) in values
            }
            parser.add_argument(*name.split(), **row | known)


def add_shared(parser: Any, name: str, changes: dict[str, Any] | None = None) -> None:
    """Add the options of the table ``name`` of ``parser.yaml``, with changes to their rows."""
    add_options(parser, _changed(SHARED[name], changes or {}))


def _changed(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    own = {
        key: _changed(table[key], value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    return table | own
