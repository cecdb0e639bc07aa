# SPDX-License-Identifier: Apache-2.0
"""Files to which a run appends JSON objects, one per line, with their ``step``.

A last line without a line end was written by a killed process and is ignored.
"""

import json
from pathlib import Path
from typing import Any

from megatron.bridge.utils.errors import UserError

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Read the objects in a file; return an empty list if there is no such file."""
    try:
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): repair or remove it") from error
    return [
        _parse_row(line, f"{path}, line {line_number}")
        for line_number, line in enumerate(lines, start=1)
    ]


def _parse_row(line: str, location: str) -> Row:
    try:
        row = json.loads(line)
        return row | {"step": row["step"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{location} is damaged: {line[:60]!r}; remove it") from error


def text_until(path: Path, step: int) -> str:
    """Return the lines up to ``step``: a killed run may have written later lines after its last checkpoint."""
    return to_text([row for row in read(path) if row["step"] <= step]) if step else ""


def to_text(rows: list[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
