# SPDX-License-Identifier: Apache-2.0
"""Which existing files a command replaces: those that an earlier call of the same command wrote."""

import argparse
import json
from pathlib import Path
from typing import Any, cast

from megatron.bridge.utils.errors import UserError

# (command, option) of a JSON file -> keys by which its contents are recognized
_JSON_KEYS = {
    ("eval", "output"): ("results", "configs"),
    ("verify", "certificate"): ("holds", "tensors"),
}
_YAML_COMMANDS = ("tune", "launch", "from-megatron-lm", "from-trainer")  # option ``output``
_PAGES = ("report", "timeline", "html")


def header(command: str) -> str:
    """Return the first line of a YAML file that ``command`` writes."""
    return f"# written by megatron-bridge {command}\n"


def refuse_unrelated_files(command: str, args: argparse.Namespace) -> None:
    """Refuse to replace a file that the same command has not written, before anything is computed."""
    for option, value in vars(args).items():
        path = Path(value) if isinstance(value, (str, Path)) else None
        is_output = (
            (command, option) in _JSON_KEYS
            or option in _PAGES
            or (option == "output" and command in _YAML_COMMANDS)
        )
        if not is_output or path is None or not path.is_file():
            continue
        if path.stat().st_size and not _is_of_command(command, option, path):
            raise UserError(
                f"--{option} {path} exists, and `megatron-bridge {command}` did not write it: choose another file, "
                "or move it"
            )


def _is_of_command(command: str, option: str, path: Path) -> bool:
    if option in _PAGES:
        return _read_head(path).lstrip().lower().startswith("<!doctype html")
    if (command, option) not in _JSON_KEYS:
        return _read_head(path).startswith(header(command))
    try:
        contents: Any = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(contents, dict):
        return False
    stored = cast("dict[str, Any]", contents)
    return all(key in stored for key in _JSON_KEYS[command, option])


def _read_head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(256).decode(errors="replace")
