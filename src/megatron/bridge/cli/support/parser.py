# SPDX-License-Identifier: Apache-2.0
"""The argument parser of every command and script, and the types and actions of their options."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

type OptionGroup = argparse._ArgumentGroup
"""What ``parser.add_argument_group`` returns."""

POSITIONAL = ""
"""Stands for the positional argument of a command in ``Parser.add_hidden_names``."""

MAX_COUNT = 1 << 20  # processes, which layouts and reports count one by one
MAX_WORKERS = 1024

# ``--output "$OUT"`` with OUT unset would mean the working directory
_EMPTY_PATH = "the path is empty: is a variable of the shell not set?"


class HelpFormatter(argparse.HelpFormatter):
    """Wraps a paragraph to the terminal and keeps the line breaks of several lines, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        if len(lines) == 1:
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in lines)


class Parser(argparse.ArgumentParser):
    """Takes options by their full names, with ``-`` or ``_`` between the words.

    ``type=Path``, or a class of paths, refuses an empty path. Parsers of subcommands are of this class, too.
    """

    def __init__(self, *, formatter_class: Any = HelpFormatter, **options: Any) -> None:
        super().__init__(formatter_class=formatter_class, allow_abbrev=False, **options)
        self._hidden_names: dict[str, str] = {}
        self._options_of_words: tuple[str, ...] = ()

    def add_hidden_names(self, names: Mapping[str, str]) -> None:
        """Accept further names of options, which the help does not show.

        Args:
            names: Further name -> name of an option, or ``POSITIONAL`` if the value is the
                positional argument.
        """
        self._hidden_names.update(names)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        parsed, unknown = super().parse_known_args(self._replace_names(words), namespace)
        if self._options_of_words and not any(word.startswith("-") for word in unknown):
            unknown = self._set_options_of_words(parsed, unknown)
        return parsed, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a word to the type of an option, as argparse does, but refuse empty paths."""
        is_path = isinstance(action.type, type) and issubclass(action.type, Path)
        if is_path and not arg_string:
            raise argparse.ArgumentError(action, _EMPTY_PATH)
        return super()._get_value(action, arg_string)  # pyright: ignore[reportAttributeAccessIssue]

    def add_options_of_words(self, *names: str) -> None:
        """Accept the values of these options, in this order, also without the names of the options."""
        self._options_of_words = names

    def _set_options_of_words(self, parsed: argparse.Namespace, words: list[str]) -> list[str]:
        """Give words without an option to the options that are not set; return the words left over."""
        remaining = list(words)
        for name in self._options_of_words:
            action = self._option_string_actions[name]
            if remaining and getattr(parsed, action.dest) is None:
                super().parse_known_args([name, remaining.pop(0)], parsed)
        return remaining

    def _replace_names(self, words: Sequence[str]) -> list[str]:
        """Replace other spellings and hidden names of options by the names that argparse knows."""
        replaced: list[str] = []
        for position, word in enumerate(words):
            if word == "--":
                return [*replaced, *words[position:]]
            name, equals, value = word.partition("=")
            known_name = self._find_other_name(name)
            if known_name is None:
                replaced.append(word)
            elif known_name != POSITIONAL:
                replaced.append(f"{known_name}{equals}{value}")
            elif equals:
                replaced.append(value)
        return replaced

    def _find_other_name(self, name: str) -> str | None:
        """Return the name that argparse knows for another name of an option, else None."""
        if not name.startswith("--") or name in self._option_string_actions:
            return None
        dashed_name = name.replace("_", "-")
        if dashed_name in self._hidden_names:
            return self._hidden_names[dashed_name]
        for option in self._option_string_actions:
            if option.replace("_", "-") == dashed_name:
                return option
        return None


def count(text: str) -> int:
    """The ``type`` of an option that takes a number of processes, steps or samples."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_COUNT):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {MAX_COUNT}")
    return int(text)


def workers(text: str) -> int:
    """The ``type`` of an option that takes a number of worker processes on this machine."""
    if count(text) > MAX_WORKERS:
        raise argparse.ArgumentTypeError(
            f"{text} is more than {MAX_WORKERS}, too many processes for one machine"
        )
    return int(text)


def location(text: str) -> str:
    """The ``type`` of an option that takes a path, a hub id, or a URL of object storage."""
    return text


def location_path(text: str) -> Path:
    """The ``type`` of an option that takes a path or a URL of object storage."""
    if not text:
        raise argparse.ArgumentTypeError(_EMPTY_PATH)
    return Path(text)


def location_options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the names, as attributes, of the options of a command that take URLs of object storage."""
    names: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                names |= location_options(subparser)
        elif action.type in (location, location_path):
            names.add(action.dest)
    return names


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def memory_size(text: str) -> int:
    """The ``type`` of an option that takes bytes, such as ``4GB`` or ``512M``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 4GB or 512MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class NamedPaths(argparse.Action):
    """Collects ``name=path``."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        name, _, path = values.partition("=")
        paths = dict(getattr(namespace, self.dest) or {})
        if not name or not path or name in paths:
            parser.error(f"{option_string} {values}: give NAME=DIR, each name once")
        setattr(namespace, self.dest, {**paths, name: path})


class Refused(argparse.Action):
    """Ends the command with the reason why it does not support an argument of another program."""

    def __init__(self, reason: str, **names: Any) -> None:
        super().__init__(nargs="*", const=reason, help=argparse.SUPPRESS, **names)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"{self.option_strings[0]} is not supported: {self.const}")
