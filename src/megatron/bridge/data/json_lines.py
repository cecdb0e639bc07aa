# SPDX-License-Identifier: Apache-2.0
"""One line of a JSONL file."""

import json
from typing import Any

from megatron.bridge.utils.errors import UserError


def parse_record(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object on a line.

    Args:
        line: its bytes.
        where: file and line number, for the message.

    Raises:
        UserError: not UTF-8, not JSON, or not an object.
    """
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: this line is not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: this line is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: a line must be a JSON object, not {type(record).__name__}")
    return record
