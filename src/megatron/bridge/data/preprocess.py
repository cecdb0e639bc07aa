# SPDX-License-Identifier: Apache-2.0
"""Text to Megatron-Core's indexed format: a ``.bin`` with the tokens and an ``.idx`` with the bounds of documents.

Worker processes parse and tokenise pieces of about a megabyte; this process reads and writes, in the order of the
input. The two files appear together, at the end, or not at all.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron.bridge.data.json_lines import parse_record
from megatron.bridge.data.parallel import ordered_map
from megatron.bridge.data.tokenizer import batch_encoder, load_hf_tokenizer
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError, did_you_mean

Format = Literal["jsonl", "text"]

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
        format: of all inputs; None goes by the file names.
        text_document: what a document is in plain text: the whole file, or each line.
        append_eod: end each document with the tokenizer's end-of-sequence token.
        add_special_tokens: let the tokenizer add its own special tokens (such as BOS) to each document.
        workers: processes that tokenise; 1 stays in this process.
        overwrite: replace an existing output.
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
    overwrite: bool = False
    trust_remote_code: bool = False


@dataclass
class Report:
    """What came out.

    Attributes:
        documents: documents written.
        tokens: tokens written, end-of-document tokens included.
        empty: lines and texts left out because they hold nothing.
        input_bytes: bytes read.
        seconds: time spent, without start-up (imports, loading the tokenizer).
    """

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    input_bytes: int = 0
    seconds: float = 0.0

    def summary(self) -> str:
        """One line for people."""
        left_out = f", {self.empty:,} empty left out" if self.empty else ""
        speed = self.input_bytes / 1e6 / max(self.seconds, 1e-9)
        return f"{self.documents:,} documents, {self.tokens:,} tokens{left_out}; {speed:.1f} MB/s"


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
        self._hf = load_hf_tokenizer(config.tokenizer_model, config.trust_remote_code)
        self._key = config.json_key
        self._by_line = config.text_document == "line"
        self._special = config.add_special_tokens
        self._end = [self._eod(config)] if config.append_eod else []
        self._batch = batch_encoder(self._hf)
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
        read = self._json_text if piece.format == "jsonl" else self._plain_text
        texts = (
            read(line, f"{piece.source}:{number}")
            for number, line in enumerate(piece.lines, start=piece.first_line)
            if line.strip()
        )
        kept = [text for text in texts if text]
        documents = [ids + self._end for ids in self._batch(kept, self._special) if ids]
        lengths = [len(ids) for ids in documents]
        tokens = np.fromiter(chain.from_iterable(documents), self.dtype, sum(lengths))
        empty = len(piece.lines) - len(documents)
        return Tokens(tokens, lengths, empty, sum(map(len, piece.lines)))

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
    """Tokenise ``config.inputs`` into an indexed dataset.

    Raises:
        UserError: an input, the tokenizer, a line or the output is not as it should be. Nothing is left behind.
    """
    formats = _check(config)
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # seconds: after the checks

    encoder = Encoder(config)
    report, start = Report(), time.perf_counter()
    with (
        ordered_map(encoder, config.workers) as encode,
        _indexed_files(config.output_prefix, IndexedDatasetBuilder, encoder.dtype) as write,
    ):
        for result in _progress(encode(_pieces(config, formats)), config):
            write(result)
            report.documents += len(result.lengths)
            report.tokens += len(result.tokens)
            report.empty += result.empty
            report.input_bytes += result.input_bytes
        if not report.documents:
            raise UserError(f"{', '.join(map(str, config.inputs))}: there is no text in it")
    report.seconds = time.perf_counter() - start
    return report


def _check(config: PreprocessConfig) -> list[Format]:
    """The format of each input."""
    if config.workers < 1:
        raise UserError(f"--workers={config.workers}: it must be at least 1")
    for suffix in (".bin", ".idx"):
        path = Path(f"{config.output_prefix}{suffix}")
        if path.exists() and not config.overwrite:
            raise UserError(f"the output {path} exists: choose another prefix, or replace it with --overwrite")
    for path in config.inputs:
        if not path.is_file():
            raise UserError(f"the input {path} is not a file")
    return [config.format or _format_of(path) for path in config.inputs]


def _format_of(path: Path) -> Format:
    if path.suffix not in SUFFIXES:
        known = " ".join(SUFFIXES)
        raise UserError(f"cannot tell the format of {path} (known endings: {known}): say --format jsonl or text")
    return SUFFIXES[path.suffix]


def _pieces(config: PreprocessConfig, formats: list[Format]) -> Iterator[Piece]:
    for path, kind in zip(config.inputs, formats, strict=True):
        try:
            with path.open("rb") as file:
                if kind == "text" and config.text_document == "file":
                    yield Piece(str(path), 1, [file.read()], kind)
                    continue
                line = 1
                while lines := file.readlines(PIECE_BYTES):
                    yield Piece(str(path), line, lines, kind)
                    line += len(lines)
        except OSError as error:
            raise UserError(f"the input {path} cannot be read: {error.strerror}") from error


@contextmanager
def _indexed_files(prefix: Path, builder_class: Any, dtype: Any) -> Iterator[Callable[[Tokens], None]]:
    """Write beside the final names; rename at the end, the index last, because readers look for it first."""
    final = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    aside = [path.with_name(f"{path.name}.incomplete") for path in final]
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder: Any = builder_class(str(aside[0]), dtype=dtype)

        def write(result: Tokens) -> None:
            start = 0
            for length in result.lengths:
                document: Any = result.tokens[start : start + length]
                builder.add_document(document, [length])
                start += length

        yield write
        builder.finalize(str(aside[1]))
        _publish(aside, final)
    except OSError as error:
        raise UserError(f"cannot write {final[0]}: {error.strerror}: free space or write elsewhere") from error
    finally:
        for path in aside:
            with suppress(OSError):
                path.unlink()


def _publish(aside: list[Path], final: list[Path]) -> None:
    for path in aside:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    final[1].unlink(missing_ok=True)  # an old index must never describe new tokens
    for source, target in zip(aside, final, strict=True):
        source.replace(target)


def _progress(results: Iterator[Tokens], config: PreprocessConfig) -> Iterator[Tokens]:
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
        task = progress.add_task("", total=sum(path.stat().st_size for path in config.inputs))
        for result in results:
            yield result
            progress.advance(task, result.input_bytes)
