# SPDX-License-Identifier: Apache-2.0
"""Read files of prompts and write files of completions: one line per prompt in the same order; can be resumed."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from megatron.bridge.data.records.jsonl import open_data, parse_record
from megatron.bridge.data.records.media_parts import MEDIA_KEYS
from megatron.bridge.inference.conversations.options import OPTION_NAMES, read_options
from megatron.bridge.inference.prompts import Messages, Prompt
from megatron.bridge.inference.requests import (
    Completion,
    Sampling,
    TokenLogprob,
    encode_experts,
)
from megatron.bridge.utils.errors import UserError, did_you_mean

REQUEST = "request"
"""Key of the digest in a line of completions."""
_PROMPTS = ("prompt", "text", "input", "messages")
_OVERRIDES = tuple(field.name for field in fields(Sampling))
_SEEDS = (
    1_000_003  # distance between seeds of the command, from which each line derives its own seed
)


@dataclass(frozen=True)
class PromptLine:
    id: str | int  # the line's ``id``, or else its number, starting at 1
    prompt: Prompt | Messages  # a text, token ids, or messages
    sampling: Sampling  # sampling of the command, updated with the line's own values
    where: str  # file and line number


def read_prompts(path: Path, defaults: Mapping[str, Any], chat: bool = False) -> list[PromptLine]:
    """Read the prompts of a file: JSON objects in ``.jsonl``, otherwise one text per line.

    ``defaults`` are the sampling parameters of the command; ``chat`` converts texts to user messages. The seed of a
    line is derived from the command's seed and the line number, unless the line has its own.
    """
    lines = list(_read_lines(path, defaults, chat))
    if not lines:
        raise UserError(f"{path} has no prompts: write one per line")
    location_of_id: dict[str | int, str] = {}
    for line in lines:
        if line.id in location_of_id:
            raise UserError(
                f"{line.where}: {location_of_id[line.id]} has the same id={line.id!r}: ids must differ"
            )
        location_of_id[line.id] = line.where
    return lines


def _read_lines(path: Path, defaults: Mapping[str, Any], chat: bool) -> Iterator[PromptLine]:
    with open_data(path) as file:
        for line_number, raw in enumerate(file, start=1):
            location = f"{path}:{line_number}"
            if not raw.strip():
                continue
            record = (
                parse_record(raw, location)
                if path.suffix == ".jsonl"
                else {"prompt": _decode_line(raw, location)}
            )
            yield _parse_line(record, location, line_number, defaults, chat)


def _decode_line(raw: bytes, location: str) -> str:
    try:
        return raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: the line is not UTF-8 ({error.reason})") from error


def _parse_line(
    record: dict[str, Any], location: str, line_number: int, defaults: Mapping[str, Any], chat: bool
) -> PromptLine:
    given = [key for key in _PROMPTS if key in record]
    if len(given) != 1:
        raise UserError(
            f"{location}: has {' and '.join(given) or 'no prompt'}: give one of {', '.join(_PROMPTS)}"
        )
    media = MEDIA_KEYS if given == ["messages"] else ()
    options = OPTION_NAMES if given == ["messages"] else ()
    known = (*given, "id", *_OVERRIDES, *media, *options)
    for key in record:
        if key not in known:
            raise UserError(f"{location}: unknown key {key}{did_you_mean(key, known)}")
    prompt = record[given[0]]
    if given == ["messages"] and not (
        isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
    ):
        raise UserError(f"{location}: messages must be a list with at least one message")
    if given != ["messages"] and not _is_prompt(prompt):
        raise UserError(
            f"{location}: {given[0]} must be a text or a list of token ids, not {type(prompt).__name__}"
        )
    options_of_line = {key: record[key] for key in options if key in record}
    if options_of_line:
        _check_options(options_of_line, location)
    media_of_line = {key: record[key] for key in media if key in record}
    if options_of_line or media_of_line:
        prompt = {"messages": prompt, **media_of_line, **options_of_line}
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    name = record.get("id", line_number)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise UserError(f"{location}: id={name!r} must be a text or a number")
    seed = defaults.get("seed")
    seeded = {} if seed is None else {"seed": seed * _SEEDS + line_number}
    overrides = {key: record[key] for key in _OVERRIDES if key in record}
    return PromptLine(
        name,
        prompt,
        Sampling.from_dict({**defaults, **seeded, **overrides}, f"{location}: "),
        location,
    )


def _check_options(options: Mapping[str, Any], location: str) -> None:
    """Refuse wrong options of a conversation before the model is loaded."""
    try:
        read_options(options)
    except UserError as error:
        raise UserError(f"{location}: {error}") from error


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(type(token) is int for token in value)
    )


@dataclass(frozen=True)
class LineMark:
    """What an output line must say for an input line to be done."""

    id: str | int | None  # name of the input line
    digest: str  # of all that decides the output


class ResumableFile:
    """Output lines, one for each input line in the same order, after those that an interrupted command left.

    Args:
        path: File to create or to continue.
        marks: The marks of all lines.
        read_mark: Returns the name and the digest that an output line has.
    """

    def __init__(
        self,
        path: Path,
        marks: Sequence[LineMark],
        read_mark: Callable[[Mapping[str, Any]], tuple[Any, Any]],
    ) -> None:
        self.path = path
        try:
            old = path.read_bytes() if path.exists() else b""
            complete_lines = old[: old.rfind(b"\n") + 1]
            self.done = _check_done(path, complete_lines.splitlines(), marks, read_mark)
            self._file: IO[bytes] = path.open("r+b" if path.exists() else "wb")
            self._file.truncate(len(complete_lines))
            self._file.seek(len(complete_lines))
        except OSError as error:
            raise UserError(f"--output {path} cannot be written: {error.strerror}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line and flush it to disk."""
        self._file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class CompletionFile:
    """The completions of ``lines``, written line by line after those that an interrupted command left.

    Each line holds a digest of its prompt and of all that decides its completion: only the same command goes on.

    Args:
        path: file to create or to continue.
        lines: the prompts with their sampling parameters.
        settings: what else decides the completions: the model, its adapters and its template.
    """

    def __init__(self, path: Path, lines: Sequence[PromptLine], settings: str = "") -> None:
        self._settings = settings
        marks = [LineMark(line.id, request_digest(line, settings)) for line in lines]
        self._file = ResumableFile(
            path, marks, lambda record: (record.get("id"), record.get(REQUEST))
        )
        self.done = self._file.done

    def append(self, line: PromptLine, completions: Sequence[Completion]) -> None:
        """Write one line and flush it to disk."""
        digest = request_digest(line, self._settings)
        self._file.append(as_record(line, completions) | {REQUEST: digest})

    def close(self) -> None:
        self._file.close()


def request_digest(line: PromptLine, settings: str) -> str:
    """Return a digest of a prompt, its sampling parameters and the settings of the command."""
    sampling = asdict(line.sampling)
    del sampling["priority"]  # changes no token
    if not sampling["routed_experts"]:
        del sampling["routed_experts"]  # files of earlier versions have no such setting
    return digest_of([line.prompt, sampling, settings])


def digest_of(content: Any) -> str:
    """Return a short digest of what decides an output line."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_done(
    path: Path,
    old: Sequence[bytes],
    marks: Sequence[LineMark],
    read_mark: Callable[[Mapping[str, Any]], tuple[Any, Any]],
) -> int:
    """Return the number of completed lines; refuse a file whose lines are not of these prompts and settings."""
    for line_number, raw in enumerate(old, start=1):
        line_id, digest = read_mark(parse_record(raw, f"{path}:{line_number}"))
        if line_number > len(marks) or line_id != marks[line_number - 1].id:
            raise UserError(
                f"{path}:{line_number} has id={line_id!r}, but the prompt of that line has "
                "another id: remove the file, or choose another --output"
            )
        if digest != marks[line_number - 1].digest:
            raise UserError(
                f"{path}:{line_number} with id={line_id!r} was completed from another prompt, "
                "with other sampling parameters or by another model: remove the file, or choose another --output"
            )
    return len(old)


def as_record(line: PromptLine, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the output line: the fields of a single completion, or a list of several ``completions``."""
    records = [_completion_record(completion, line.sampling) for completion in completions]
    return {"id": line.id, **(records[0] if line.sampling.n == 1 else {"completions": records})}


def _completion_record(completion: Completion, sampling: Sampling) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": completion.tokens,
    }
    message = completion.message
    if message is not None and message != {"role": "assistant", "content": completion.text}:
        record["message"] = message
    if not sampling.is_greedy:
        record["seed"] = completion.seed
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None:
            record[name] = [_logprob_record(token) for token in getattr(completion, name)]
    if completion.routed_experts is not None:
        record["routed_experts"] = encode_experts(completion.routed_experts)
    return record


def _logprob_record(token: TokenLogprob) -> dict[str, Any]:
    record = asdict(token)
    return record if token.top else {key: value for key, value in record.items() if key != "top"}
