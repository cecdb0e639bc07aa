# SPDX-License-Identifier: Apache-2.0
"""Files to which a run appends a JSON object with its ``step`` per line.

A line without an end is what a killed process wrote last, and does not count.
"""

import json
from pathlib import Path
from typing import Any

from megatron.bridge.utils.errors import UserError


def read(path: Path) -> list[dict[str, Any]]:
    """The objects in a file; an empty list if there is no such file.

    Raises:
        UserError: The file is damaged.
    """
    try:
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [row | {"step": row["step"]} for row in map(json.loads, lines)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged, a line is not JSON of this run: repair or remove the file") from error


def text_until(path: Path, step: int) -> str:
    """The lines up to ``step``: a killed run has written later ones after its last checkpoint."""
    return to_text([row for row in read(path) if row["step"] <= step]) if step else ""


def to_text(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
