# SPDX-License-Identifier: Apache-2.0
"""Types of options that name a file to write.

A command never writes over one of its inputs, and it replaces a file only if an earlier call of the same command wrote
it. The type of the option says how such a file is recognized: ``parser.add_argument("--report", type=HtmlPage)``.
"""

import argparse
import json
from pathlib import Path
from typing import Any, ClassVar, cast

from megatron.bridge.utils.errors import UserError


class OutputFile(Path):
    """A file that a command writes, and replaces if it exists."""

    def is_written_by(self, command: str) -> bool:
        """Return whether the file, which exists and is not empty, may be replaced."""
        del command
        return True


class YamlFile(OutputFile):
    """Starts with ``header``."""

    def is_written_by(self, command: str) -> bool:
        return _read_head(self).startswith(header(command))


class HtmlPage(OutputFile):
    """Any HTML page counts as one that the command wrote."""

    def is_written_by(self, command: str) -> bool:
        return _read_head(self).lstrip().lower().startswith("<!doctype html")


class JsonFile(OutputFile):
    """A JSON object that has all ``keys``."""

    keys: ClassVar[tuple[str, ...]]

    def is_written_by(self, command: str) -> bool:
        try:
            contents: Any = json.loads(self.read_text())
        except (OSError, ValueError):
            return False
        if not isinstance(contents, dict):
            return False
        stored = cast("dict[str, Any]", contents)
        return all(key in stored for key in self.keys)


def header(command: str) -> str:
    """Return the first line of a YAML file that ``command`` writes."""
    return f"# written by megatron-bridge {command}\n"


def check_outputs(command: str, args: argparse.Namespace) -> None:
    """Refuse output files that the command also reads, and those that it has not written.

    Raises:
        UserError: with the option and the file, before anything is computed.
    """
    values = vars(args)
    inputs = {name: value for name, value in values.items() if not isinstance(value, OutputFile)}
    for option, path in values.items():
        if not isinstance(path, OutputFile) or not path.exists():
            continue
        _refuse_input(option, path, inputs)
        if path.is_file() and path.stat().st_size and not path.is_written_by(command):
            raise UserError(
                f"--{option} {path} exists, and `megatron-bridge {command}` did not write it: choose another file, "
                "or move it"
            )


def _refuse_input(option: str, path: OutputFile, inputs: dict[str, Any]) -> None:
    for name, value in inputs.items():
        items = value if isinstance(value, list | tuple) else [value]
        for item in cast("list[Any]", items):
            if _is_same_file(item, path):
                raise UserError(
                    f"--{option} {path} is also what the command reads as {name}, and would be overwritten: choose "
                    "another file"
                )


def _is_same_file(value: Any, path: Path) -> bool:
    if not isinstance(value, str | Path):
        return False
    try:
        return Path(value).samefile(path)
    except (OSError, ValueError):  # not a path, or no file
        return False


def _read_head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(256).decode(errors="replace")
