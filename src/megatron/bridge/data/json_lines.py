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
        UserError: not UTF-8, not JSON, not an object, a key that is there twice, or half a character.
    """
    try:
        record = _read(line)
    except _TwiceError as error:
        raise UserError(f"{where}: the key {error} is there twice in one object: keep one") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: this line is not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: this line is not JSON: {error.msg.removesuffix(' at')} at column {error.colno} "
            f"(one whole object a line)"
        ) from error
    except (RecursionError, ValueError) as error:  # what JSON allows and Python does not
        reason = "a number has thousands of digits" if isinstance(error, ValueError) else "it is nested too deeply"
        raise UserError(f"{where}: this line cannot be read: {reason}") from error
    if not isinstance(record, dict):
        raise UserError(
            f"{where}: a line must be a JSON object, not {type(record).__name__}: write one object a line"
        )
    if b"\\ud" in line.lower() and (half := _half_character(record)):
        raise UserError(f"{where}: {half} is one half of a pair and no character: mend the line")
    return record


class _TwiceError(ValueError):
    """A key that an object has twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python's reader keeps the last of two equal keys, in silence."""
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(repr(next(key for key in made if keys.count(key) > 1)))
    return made


def _read(line: bytes) -> Any:
    """A decoder that is made once is faster than ``json.loads`` with a hook."""
    return _DECODER.decode(line.decode("utf-8-sig"))


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _half_character(record: dict[str, Any]) -> str | None:
    """The first surrogate without its other half: an escape that JSON allows, but that no text can hold."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None
