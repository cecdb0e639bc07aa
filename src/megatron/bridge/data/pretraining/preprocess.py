# SPDX-License-Identifier: Apache-2.0
"""Convert text to Megatron-Core's indexed format: ``.bin`` has the tokens, ``.idx`` the start of each document.

Worker processes parse and tokenize chunks of about a megabyte. This process reads the input and writes the output,
in the order of the input.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron.bridge.data.pretraining.indexed_writer import (
    EncodedDocuments,
    IndexedDatasetWriter,
    PreprocessReport,
    finished_state,
)
from megatron.bridge.data.pretraining.inputs import (
    DocumentChunk,
    Format,
    InputPart,
    find_parts,
    read_chunks,
)
from megatron.bridge.data.records.chat_template import template_text
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.formats import expect
from megatron.bridge.data.records.jsonl import parse_record
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.sources import FileSource
from megatron.bridge.data.tokenizer import (
    HuggingFaceTokenizer,
    TextRole,
    encode_many,
    tokenizer_key,
)
from megatron.bridge.data.worker_pool import ordered_map
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError, did_you_mean

VERSION = 1  # version of the output: a dataset of another version is written again

LONGEST = 2**31 - 1


@dataclass(kw_only=True)
class PreprocessConfig:
    """The input, the tokenizer and the output of preprocessing."""

    # files, URLs of any fsspec scheme, patterns of both, or ``hub:ID?revision=COMMIT``; in the order of the output
    inputs: list[Path | str]
    output_prefix: Path  # the output path without ``.bin`` and ``.idx``
    tokenizer_model: str  # directory or hub id of a Hugging Face tokenizer
    json_key: str = "text"  # key of the text in a JSONL line
    # format of all inputs; None derives it from the file names. ``chat`` is JSONL with records as for fine-tuning: a
    # document is the text that the chat template renders.
    format: Format | None = None
    text_document: Literal["file", "line"] = (
        "file"  # a document of plain text: the entire file, or each line
    )
    append_eod: bool = False  # end each document with the tokenizer's end-of-sequence token
    add_special_tokens: bool = (
        False  # let the tokenizer add its special tokens (such as BOS) to each document
    )
    # number of processes that tokenize; 1 tokenizes in this process
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    # file with a Jinja template, or the template itself, to use instead of the tokenizer's template
    chat_template: str | None = None
    overwrite: bool = False  # replace an existing output, even if it was made from the same content
    trust_remote_code: bool = False  # allow a tokenizer that brings its own Python code


class DocumentEncoder:
    """Tokenizes chunks of documents; each process has its own encoder. Errors name the file and the line number."""

    def __init__(self, config: PreprocessConfig) -> None:
        self.tokenizer = HuggingFaceTokenizer(config.tokenizer_model, config.trust_remote_code)
        self._key = config.json_key
        self._by_line = config.text_document == "line"
        self._role: TextRole = "beginning" if config.add_special_tokens else "document"
        self._end = [self.tokenizer.eod] if config.append_eod else []
        rules = EncodingRules(
            LONGEST, train_on="everything", chat_template=template_text(config.chat_template)
        )
        self._records = RecordEncoder(self.tokenizer, rules)
        # Megatron-Core's readers expect uint16 for small vocabularies. Ids may have gaps, so len() is not enough.
        self.dtype = (
            np.uint16 if max(self.tokenizer.hf.get_vocab().values()) < 65500 - 1 else np.int32
        )

    def __call__(self, chunk: DocumentChunk) -> EncodedDocuments:
        documents = self._chats(chunk) if chunk.format == "chat" else self._texts(chunk)
        lengths = [len(ids) for ids in documents]
        tokens = np.fromiter(chain.from_iterable(documents), self.dtype, sum(lengths))
        empty = len(chunk.lines) - len(documents)
        return EncodedDocuments(tokens, lengths, empty, sum(map(len, chunk.lines)), chunk.end)

    def _chats(self, chunk: DocumentChunk) -> list[list[int]]:
        records = [
            (location, parse_record(line, location)) for location, line in _located_lines(chunk)
        ]
        token_lists = [sample.tokens.tolist() for sample in self._records(records).samples]
        return [ids if ids[-1:] == self._end else ids + self._end for ids in token_lists]

    def _texts(self, chunk: DocumentChunk) -> list[list[int]]:
        read = self._json_text if chunk.format == "jsonl" else self._plain_text
        texts = [text for location, line in _located_lines(chunk) if (text := read(line, location))]
        return [ids + self._end for ids in encode_many(self.tokenizer, texts, self._role) if ids]

    def _json_text(self, line: bytes, location: str) -> str:
        record = parse_record(line, location)
        if self._key not in record:
            keys = ", ".join(record) or "none"
            hint = did_you_mean(self._key, record)
            raise UserError(
                f"{location}: the key {self._key!r} is missing; name one with --json-key (keys: {keys}){hint}"
            )
        return expect(record[self._key], "a string", location, repr(self._key))

    def _plain_text(self, document: bytes, location: str) -> str:
        try:
            text = document.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{location}: the text is not UTF-8 ({error.reason} at byte {error.start})"
            ) from error
        return text.rstrip("\r\n") if self._by_line else text


def _located_lines(chunk: DocumentChunk) -> Iterator[tuple[str, bytes]]:
    """Yield the file and line number of each line that is not blank, and the line."""
    for line_number, line in enumerate(chunk.lines, start=chunk.first_line):
        if line.strip():
            yield f"{chunk.source}:{line_number}", line


def preprocess(config: PreprocessConfig) -> PreprocessReport:
    """Tokenize ``config.inputs`` into an indexed dataset, or resume; an error of the input leaves no files behind."""
    parts = checked_parts(config)
    encoder = DocumentEncoder(config)
    key = dataset_key(
        config, encoder.tokenizer, [part.format for part in parts], _content_hashes(parts)
    )
    finished = finished_state(config.output_prefix)
    if finished is not None and finished.key == key and not config.overwrite:
        return replace(finished.report, found=True)
    refuse_existing(config)
    with (
        ordered_map(encoder, config.workers) as encode,
        IndexedDatasetWriter(config.output_prefix, encoder.dtype, key) as output,
    ):
        report = output.state.report
        if report.documents:
            console().print(f"resuming after {report.documents:,} documents", markup=False)
        chunks = read_chunks(config, parts, output.state.place)
        for documents in _show_progress(
            encode(chunks), sum(part.size for part in parts), report.input_bytes
        ):
            output.write(documents)
        if not report.documents:
            raise UserError(
                f"the input {', '.join(map(str, config.inputs))} holds no text: check --input"
            )
    return report


def checked_parts(config: PreprocessConfig) -> list[InputPart]:
    if config.workers < 1:
        raise UserError(f"--workers={config.workers}: it must be at least 1")
    if config.chat_template is not None and config.format != "chat":
        raise UserError(
            f"--chat-template={config.chat_template} is for conversations: add --format chat"
        )
    return find_parts(config)


def refuse_existing(config: PreprocessConfig, endings: tuple[str, ...] = (".bin", ".idx")) -> None:
    for suffix in endings:
        path = Path(f"{config.output_prefix}{suffix}")
        if path.exists() and not config.overwrite:
            raise UserError(
                f"the output {path} exists and has another source: choose another --output-prefix, or "
                f"replace it with --overwrite"
            )


def dataset_key(
    config: PreprocessConfig, tokenizer: HuggingFaceTokenizer, formats: list[Format], inputs: Any
) -> str:
    """Return a hash of everything that determines the output."""
    options = (config.json_key, config.text_document, config.append_eod, config.add_special_tokens)
    template = template_text(config.chat_template)
    parts = [VERSION, tokenizer_key(tokenizer), options, template, formats, inputs]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def _content_hashes(parts: list[InputPart]) -> list[str]:
    """Return hashes of local files, which may move, and the versions of remote files, which are not read twice."""
    paths = [Path(part.url) for part in parts]
    return [
        FileSource(path).fingerprint() if path.is_file() else f"{part.url} {part.version}"
        for path, part in zip(paths, parts, strict=True)
    ]


def _show_progress(
    results: Iterator[EncodedDocuments], size: int, done: int
) -> Iterator[EncodedDocuments]:
    """Show a progress bar in bytes if the output is a terminal."""
    terminal = console()
    if not terminal.is_terminal:
        yield from results
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal) as progress:
        task = progress.add_task("", total=size or None, completed=done)
        for result in results:
            yield result
            progress.advance(task, result.input_bytes)
