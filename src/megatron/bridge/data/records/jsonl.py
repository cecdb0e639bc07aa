# SPDX-License-Identifier: Apache-2.0
"""Read JSONL (one JSON object per line), and files with one JSON list of objects."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path
from typing import Any

from megatron.bridge.utils import strict_json
from megatron.bridge.utils.errors import UserError

_unreadable: ContextVar[list[str] | None] = ContextVar("unreadable records", default=None)


@contextmanager
def skip_unreadable_records() -> Iterator[list[str]]:
    """Let sources skip records that cannot be read; yield the list that gets a sentence for each."""
    sentences: list[str] = []
    token = _unreadable.set(sentences)
    try:
        yield sentences
    finally:
        _unreadable.reset(token)


def raise_or_skip(error: UserError) -> None:
    """Raise the error of a record, or note it if unreadable records are skipped."""
    sentences = _unreadable.get()
    if sentences is None:
        raise error
    sentences.append(str(error))


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the file and line number of each object, and the object; blank lines are skipped."""
    with open_data(path) as file:
        for line_number, line in enumerate(file, start=1):
            if line.strip():
                location = f"{path}:{line_number}"
                try:
                    record = parse_record(line, location)
                except UserError as error:
                    raise_or_skip(error)
                else:
                    yield location, record


def read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a ``.json`` file, which holds one list, as LLaVA's, or one object per line."""
    with open_data(path) as file:
        is_list = file.read(4096).lstrip()[:1] == b"["
    if not is_list:
        yield from read_jsonl(path)
        return
    records = strict_json.read(path)
    for record_number, record in enumerate(records, start=1):
        location = f"{path}: record {record_number}"
        if isinstance(record, dict):
            yield location, record
            continue
        kind = type(record).__name__
        raise_or_skip(
            UserError(f"{location} must be a JSON object, not {kind}: write a list of objects")
        )


def open_data(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"the data file {path} cannot be read: {error.strerror}") from error


def parse_record(line: bytes, location: str) -> dict[str, Any]:
    """Parse the JSON object in ``line``; error messages begin with ``location`` (file and line number)."""
    try:
        record = strict_json.loads(line)
    except strict_json.DuplicateKeyError as error:
        raise UserError(f"{location}: {error} in one object: keep one") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: the line is not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{location}: the line is not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno} "
            f"(write one complete object per line)"
        ) from error
    except ValueError as error:
        raise UserError(f"{location}: the line cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise UserError(
            f"{location}: the line must be a JSON object, not {type(record).__name__}: write one object per line"
        )
    if b"\\ud" in line.lower() and (surrogate := _lone_surrogate(record)):
        raise UserError(f"{location}: {surrogate} is one half of a surrogate pair: repair the line")
    return record


def _lone_surrogate(record: dict[str, Any]) -> str | None:
    """Return the first surrogate without its other half: JSON allows the escape, but UTF-8 cannot encode it."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None
