# SPDX-License-Identifier: Apache-2.0
"""Read JSON from other programs: duplicate keys, deep nesting and huge numbers are errors.

Python's ``json`` keeps the last of two equal keys, and raises various types of errors in the other cases.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.regular_files import read_regular_file


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(
            f"the key {next(key for key in mapping if keys.count(key) > 1)!r} is given twice"
        )
    return mapping


class DuplicateKeyError(ValueError):
    """An object has two values under one key."""


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys
)  # faster than ``json.loads`` with a hook for each text


def loads(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse a JSON text in UTF-8.

    Raises:
        ValueError: the text is not valid JSON (``json.JSONDecodeError``), not UTF-8 (``UnicodeDecodeError``), has
            duplicate keys (``DuplicateKeyError``), deep nesting, or a number with thousands of digits.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        if parse_constant is None:
            return _DECODER.decode(text)
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if type(error) is ValueError and "digits" in str(
            error
        ):  # Python's message explains how to allow them
            raise ValueError("a number has thousands of digits") from error
        raise


def read(path: Path, parse_constant: Callable[[str], Any] | None = None) -> Any:
    try:
        return loads(read_regular_file(path), parse_constant)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
