# SPDX-License-Identifier: Apache-2.0
"""Text to Megatron-Core's indexed format: a ``.bin`` with the tokens and an ``.idx`` with the bounds of documents.

Worker processes parse and tokenise pieces of about a megabyte; this process reads and writes, in the order of the
input. The two files appear together, at the end, or not at all.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron.bridge.data.encoding import Encoder as RecordEncoder
from megatron.bridge.data.encoding import EncodingRules
from megatron.bridge.data.finetuning import template_text
from megatron.bridge.data.indexing import IndexWriter, Place, Report, made_of
from megatron.bridge.data.json_lines import parse_record
from megatron.bridge.data.parallel import ordered_map
from megatron.bridge.data.sources import FileSource
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, batch_encoder, tokenizer_key
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError, did_you_mean

__all__ = ["PreprocessConfig", "Report", "preprocess"]

Format = Literal["jsonl", "text", "chat"]
VERSION = 1  # of what comes out: another one is made anew

LONGEST = 2**31 - 1
PIECE_BYTES = 1 << 20  # large enough that passing results costs < 1 %, small enough to keep all workers busy
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".text": "text", ".md": "text"}


@dataclass(kw_only=True)
class PreprocessConfig:
    """What is tokenised, how, and where it goes.

    Attributes:
        inputs: files, in the order of the output.
        output_prefix: the output is this plus ``.bin`` and ``.idx``.
        tokenizer_model: directory or hub id of a Hugging Face tokenizer.
        json_key: key of the text in a JSONL line.
        format: of all inputs; None goes by the file names. ``chat`` is JSONL whose lines are records in the forms
            of fine-tuning data: a document is the text that the chat template makes of one.
        text_document: what a document is in plain text: the whole file, or each line.
        append_eod: end each document with the tokenizer's end-of-sequence token.
        add_special_tokens: let the tokenizer add its own special tokens (such as BOS) to each document.
        workers: processes that tokenise; 1 stays in this process.
        chat_template: file with a Jinja template, or the template itself, instead of the tokenizer's own.
        overwrite: replace an existing output, even one that was made of the same content.
        trust_remote_code: allow a tokenizer that brings its own Python code.
    """

    inputs: list[Path]
    output_prefix: Path
    tokenizer_model: str
    json_key: str = "text"
    format: Format | None = None
    text_document: Literal["file", "line"] = "file"
    append_eod: bool = False
    add_special_tokens: bool = False
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    chat_template: str | None = None
    overwrite: bool = False
    trust_remote_code: bool = False


class Piece(NamedTuple):
    """Consecutive documents of one file, as bytes."""

    source: str
    first_line: int
    lines: list[bytes]
    format: Format


class Tokens(NamedTuple):
    """The tokens of a piece, one document after the other."""

    tokens: np.ndarray
    lengths: list[int]
    empty: int
    input_bytes: int


class Encoder:
    """Turns pieces into tokens; made once per process.

    Raises:
        UserError: on a line that cannot be read, with its file and number.
    """

    def __init__(self, config: PreprocessConfig) -> None:
        self.tokenizer = HuggingFaceTokenizer(config.tokenizer_model, config.trust_remote_code)
        self._hf = self.tokenizer.hf
        self._key = config.json_key
        self._by_line = config.text_document == "line"
        self._special = config.add_special_tokens
        self._end = [self._eod(config)] if config.append_eod else []
        self._batch = batch_encoder(self._hf)
        rules = EncodingRules(LONGEST, train_on="everything", chat_template=template_text(config.chat_template))
        self._records = RecordEncoder(self.tokenizer, rules)
        # uint16 as Megatron-Core's readers expect it of small vocabularies; ids may have gaps, so not len()
        self.dtype = np.uint16 if max(self._hf.get_vocab().values()) < 65500 - 1 else np.int32

    def _eod(self, config: PreprocessConfig) -> int:
        token = self._hf.eos_token_id
        if not isinstance(token, int):
            raise UserError(
                f"the tokenizer {config.tokenizer_model} defines no eos_token to append: set one, or leave out "
                f"--append-eod"
            )
        return token

    def __call__(self, piece: Piece) -> Tokens:
        """The tokens of ``piece``."""
        documents = self._chats(piece) if piece.format == "chat" else self._texts(piece)
        lengths = [len(ids) for ids in documents]
        tokens = np.fromiter(chain.from_iterable(documents), self.dtype, sum(lengths))
        empty = len(piece.lines) - len(documents)
        return Tokens(tokens, lengths, empty, sum(map(len, piece.lines)))

    def _chats(self, piece: Piece) -> list[list[int]]:
        records = [
            (where, parse_record(line, where))
            for number, line in enumerate(piece.lines, start=piece.first_line)
            if line.strip() and (where := f"{piece.source}:{number}")
        ]
        found = [example.tokens.tolist() for example in self._records(records).examples]
        return [ids if ids[-1:] == self._end else ids + self._end for ids in found]

    def _texts(self, piece: Piece) -> list[list[int]]:
        read = self._json_text if piece.format == "jsonl" else self._plain_text
        texts = (
            read(line, f"{piece.source}:{number}")
            for number, line in enumerate(piece.lines, start=piece.first_line)
            if line.strip()
        )
        kept = [text for text in texts if text]
        return [ids + self._end for ids in self._batch(kept, self._special) if ids]

    def _json_text(self, line: bytes, where: str) -> str:
        record = parse_record(line, where)
        if self._key not in record:
            keys = ", ".join(record) or "none"
            hint = did_you_mean(self._key, record)
            raise UserError(f"{where}: the key {self._key!r} is missing (keys: {keys}){hint}")
        text = record[self._key]
        if not isinstance(text, str):
            raise UserError(f"{where}: {self._key!r} must be a text, not {type(text).__name__}")
        return text

    def _plain_text(self, document: bytes, where: str) -> str:
        try:
            text = document.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: this text is not UTF-8 ({error.reason} at byte {error.start})") from error
        return text.rstrip("\r\n") if self._by_line else text


def preprocess(config: PreprocessConfig) -> Report:
    """Tokenise ``config.inputs`` into an indexed dataset; one that was interrupted goes on.

    Raises:
        UserError: an input, the tokenizer, a line or the output is not as it should be. Nothing is left behind.
    """
    formats = _check(config)
    encoder = Encoder(config)
    key = _key(config, formats, encoder.tokenizer)
    if not config.overwrite and (made := made_of(config.output_prefix)) is not None and made.key == key:
        return replace(made.report, found=True)
    _refuse_existing(config)
    with (
        ordered_map(encoder, config.workers) as encode,
        IndexWriter(config.output_prefix, encoder.dtype, key) as output,
    ):
        report = output.state.report
        if report.documents:
            console().print(f"going on behind {report.documents:,} documents", markup=False)
        places: deque[Place] = deque()
        pieces = _noted(_pieces(config, formats, output.state.place), places)
        for result in _progress(encode(pieces), config, report.input_bytes):
            output.write(result.tokens, result.lengths, result.empty, result.input_bytes, places.popleft())
        if not report.documents:
            raise UserError(f"{', '.join(map(str, config.inputs))}: there is no text in it")
    return report


def _check(config: PreprocessConfig) -> list[Format]:
    """The format of each input."""
    if config.workers < 1:
        raise UserError(f"--workers={config.workers}: it must be at least 1")
    for path in config.inputs:
        if not path.is_file():
            raise UserError(f"the input {path} is not a file")
    if config.chat_template is not None and config.format != "chat":
        raise UserError(f"--chat-template={config.chat_template} is for conversations: add --format chat")
    return [config.format or _format_of(path) for path in config.inputs]


def _refuse_existing(config: PreprocessConfig) -> None:
    for suffix in (".bin", ".idx"):
        path = Path(f"{config.output_prefix}{suffix}")
        if path.exists() and not config.overwrite:
            raise UserError(
                f"the output {path} exists, made of something else: choose another prefix, or replace it with "
                f"--overwrite"
            )


def _key(config: PreprocessConfig, formats: list[Format], tokenizer: HuggingFaceTokenizer) -> str:
    """Changes as soon as anything that the output depends on does."""
    options = (config.json_key, config.text_document, config.append_eod, config.add_special_tokens)
    template = template_text(config.chat_template)
    inputs = [FileSource(path).fingerprint() for path in config.inputs]
    parts = [VERSION, tokenizer_key(tokenizer), options, template, formats, inputs]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def _format_of(path: Path) -> Format:
    if path.suffix not in SUFFIXES:
        known = " ".join(SUFFIXES)
        raise UserError(
            f"cannot tell the format of {path} (known endings: {known}): say --format jsonl, text or chat"
        )
    return SUFFIXES[path.suffix]


def _pieces(config: PreprocessConfig, formats: list[Format], start: Place) -> Iterator[tuple[Piece, Place]]:
    """Pieces from ``start`` on, each with the place behind it."""
    for number, (path, kind) in enumerate(zip(config.inputs, formats, strict=True)):
        if number < start.file:
            continue
        try:
            with path.open("rb") as file:
                if kind == "text" and config.text_document == "file":
                    yield Piece(str(path), 1, [file.read()], kind), Place(number + 1)
                    continue
                place = start if number == start.file else Place(number)
                file.seek(place.offset)
                while lines := file.readlines(PIECE_BYTES):
                    behind = Place(number, file.tell(), place.line + len(lines))
                    yield Piece(str(path), place.line, lines, kind), behind
                    place = behind
        except OSError as error:
            raise UserError(f"the input {path} cannot be read: {error.strerror}") from error


def _noted(pieces: Iterator[tuple[Piece, Place]], places: deque[Place]) -> Iterator[Piece]:
    """The pieces; the place behind each is kept until its result is there."""
    for piece, place in pieces:
        places.append(place)
        yield piece


def _progress(results: Iterator[Tokens], config: PreprocessConfig, done: int) -> Iterator[Tokens]:
    """Show how many bytes are done, on a terminal."""
    terminal = console()
    if not terminal.is_terminal:
        yield from results
        return
    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal) as progress:
        task = progress.add_task("", total=sum(path.stat().st_size for path in config.inputs), completed=done)
        for result in results:
            yield result
            progress.advance(task, result.input_bytes)
