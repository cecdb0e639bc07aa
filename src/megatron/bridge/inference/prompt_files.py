# SPDX-License-Identifier: Apache-2.0
"""Read files of prompts and write files of completions: one line per prompt in the same order; can be resumed."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from megatron.bridge.data.records.jsonl import open_data, parse_record
from megatron.bridge.data.records.media_parts import MEDIA_KEYS
from megatron.bridge.inference.prompts import Messages, Prompt
from megatron.bridge.inference.requests import Completion, Sampling, TokenLogprob
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
    lines = list(_lines(path, defaults, chat))
    if not lines:
        raise UserError(f"{path} has no prompts: write one per line")
    seen: dict[str | int, str] = {}
    for line in lines:
        if line.id in seen:
            raise UserError(
                f"{line.where}: {seen[line.id]} has the same id={line.id!r}: ids must differ"
            )
        seen[line.id] = line.where
    return lines


def _lines(path: Path, defaults: Mapping[str, Any], chat: bool) -> Iterator[PromptLine]:
    with open_data(path) as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not raw.strip():
                continue
            record = (
                parse_record(raw, where)
                if path.suffix == ".jsonl"
                else {"prompt": _text(raw, where)}
            )
            yield _line(record, where, number, defaults, chat)


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: the line is not UTF-8 ({error.reason})") from error


def _line(
    record: dict[str, Any], where: str, number: int, defaults: Mapping[str, Any], chat: bool
) -> PromptLine:
    given = [key for key in _PROMPTS if key in record]
    if len(given) != 1:
        raise UserError(
            f"{where}: has {' and '.join(given) or 'no prompt'}: give one of {', '.join(_PROMPTS)}"
        )
    media = MEDIA_KEYS if given == ["messages"] else ()
    known = (*given, "id", *_OVERRIDES, *media)
    for key in record:
        if key not in known:
            raise UserError(f"{where}: unknown key {key}{did_you_mean(key, known)}")
    prompt = record[given[0]]
    if given == ["messages"] and not (
        isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
    ):
        raise UserError(f"{where}: messages must be a list with at least one message")
    if given != ["messages"] and not _is_prompt(prompt):
        raise UserError(
            f"{where}: {given[0]} must be a text or a list of token ids, not {type(prompt).__name__}"
        )
    if beside := {key: record[key] for key in media if key in record}:
        prompt = {"messages": prompt, **beside}
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    name = record.get("id", number)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise UserError(f"{where}: id={name!r} must be a text or a number")
    seed = defaults.get("seed")
    seeded = {} if seed is None else {"seed": seed * _SEEDS + number}
    own = {key: record[key] for key in _OVERRIDES if key in record}
    return PromptLine(
        name, prompt, Sampling.from_dict({**defaults, **seeded, **own}, f"{where}: "), where
    )


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(type(token) is int for token in value)
    )


class CompletionFile:
    """The completions of ``lines``, written line by line after those that an interrupted command left.

    Each line holds a digest of its prompt and of all that decides its completion: only the same command goes on.

    Args:
        path: file to create or to continue.
        lines: the prompts with their sampling parameters.
        settings: what else decides the completions: the model, its adapters and its template.
    """

    def __init__(self, path: Path, lines: Sequence[PromptLine], settings: str = "") -> None:
        self.path, self._settings = path, settings
        try:
            old = path.read_bytes() if path.exists() else b""
            whole = old[: old.rfind(b"\n") + 1]
            self.done = _check_done(path, whole.splitlines(), lines, settings)
            self._file: IO[bytes] = path.open("r+b" if path.exists() else "wb")
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
        except OSError as error:
            raise UserError(f"--output {path} cannot be written: {error.strerror}") from error

    def append(self, line: PromptLine, completions: Sequence[Completion]) -> None:
        """Write one line and flush it to disk."""
        record = as_record(line, completions) | {REQUEST: request_digest(line, self._settings)}
        self._file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def request_digest(line: PromptLine, settings: str) -> str:
    """Return a digest of a prompt, its sampling parameters and the settings of the command."""
    content = [line.prompt, asdict(line.sampling), settings]
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_done(
    path: Path, old: Sequence[bytes], lines: Sequence[PromptLine], settings: str
) -> int:
    """Return the number of completed lines; refuse a file whose lines are not of these prompts and settings."""
    for number, raw in enumerate(old, start=1):
        record = parse_record(raw, f"{path}:{number}")
        if number > len(lines) or record.get("id") != lines[number - 1].id:
            raise UserError(
                f"{path}:{number} has id={record.get('id')!r}, but the prompt of that line has another id: remove the "
                "file, or choose another --output"
            )
        if record.get(REQUEST) != request_digest(lines[number - 1], settings):
            raise UserError(
                f"{path}:{number} with id={record.get('id')!r} was completed from another prompt, with other sampling "
                "parameters or by another model: remove the file, or choose another --output"
            )
    return len(old)


def as_record(line: PromptLine, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the output line: the fields of a single completion, or a list of several ``completions``."""
    found = [_record(completion, line.sampling) for completion in completions]
    return {"id": line.id, **(found[0] if line.sampling.n == 1 else {"completions": found})}


def _record(completion: Completion, sampling: Sampling) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": completion.tokens,
    }
    if not sampling.is_greedy:
        record["seed"] = completion.seed
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None:
            record[name] = [_logprob(one) for one in getattr(completion, name)]
    return record


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    record = asdict(one)
    return record if one.top else {key: value for key, value in record.items() if key != "top"}
