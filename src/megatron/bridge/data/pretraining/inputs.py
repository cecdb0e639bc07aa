# SPDX-License-Identifier: Apache-2.0
"""Inputs of ``data preprocess``: local files or URLs, compressed or not, tables, and streams from the hub.

The parts of an input, read one after another, hold the documents of the entire input in their order.
"""

import io
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import parse_qsl

from megatron.bridge.data.pretraining.indexed_writer import InputPosition
from megatron.bridge.data.records.sources import HubSource
from megatron.bridge.utils.errors import UserError, one_line

if TYPE_CHECKING:
    from megatron.bridge.data.pretraining.preprocess import PreprocessConfig

Format = Literal["jsonl", "text", "chat"]
CHUNK_BYTES = (
    1 << 20
)  # large enough that passing results costs < 1 %, small enough to keep all workers busy
REQUESTS = 16  # simultaneous requests: each takes a tenth of a second in object storage
HUB, TABLE = "hub:", ".parquet"
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
TEXT: dict[str, Format] = {".txt": "text", ".text": "text", ".md": "text"}
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".json": "jsonl", TABLE: "jsonl", **TEXT}


class InputPart(NamedTuple):
    """A part of an input, between two bytes, two row groups of a table, or two files of a dataset on the hub."""

    url: str
    format: Format
    size: int  # bytes; 0 if that is unknown
    version: str  # changes with the content
    start: int = 0
    end: int | None = None  # None: the end of the input

    @property
    def name(self) -> str:
        """Return the name of the part in messages, which count its lines from ``start``."""
        return f"{self.url} from {self.start}" if self.start else self.url


class DocumentChunk(NamedTuple):
    """Consecutive documents of one input, as bytes."""

    source: str
    first_line: int
    lines: list[bytes]
    format: Format
    end: InputPosition


def find_parts(config: "PreprocessConfig") -> list[InputPart]:
    """Return each input as one part; a pattern stands for the matching files, sorted by name."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(
            chain(*pool.map(lambda url: _find_parts(str(url), config.format), config.inputs))
        )


def divided(
    config: "PreprocessConfig", parts: Iterable[InputPart], size: int
) -> list[list[InputPart]]:
    """Divide the inputs into shards of about ``size`` bytes, in order: pieces of large inputs, groups of small ones."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        pieces = list(chain(*pool.map(lambda part: _divide_part(config, part, size), parts)))
    shards: list[list[InputPart]] = []
    free_bytes = 0
    for piece in pieces:
        if not shards or not 0 < piece.size <= free_bytes:
            shards.append([])
            free_bytes = size
        shards[-1].append(piece)
        free_bytes -= piece.size or size
    return shards


def read_chunks(
    config: "PreprocessConfig", parts: list[InputPart], start: InputPosition
) -> Iterator[DocumentChunk]:
    """Yield the documents of ``parts`` after ``start``, in pieces of about a megabyte."""
    for index, part in enumerate(parts):
        if index >= start.file:
            resumed = index == start.file and start.line > 1
            with _naming_input(part.url):
                yield from _read_part(
                    config, part, start if resumed else InputPosition(index, part.start)
                )


def _read_part(
    config: "PreprocessConfig", part: InputPart, position: InputPosition
) -> Iterator[DocumentChunk]:
    if _is_document(config, part):
        with _opened_input(part.url) as file:
            yield DocumentChunk(
                part.name, 1, [file.read()], part.format, InputPosition(position.file + 1)
            )
        return
    has_rows = part.url.startswith(HUB) or part.url.endswith(TABLE)
    for lines in _read_rows(config, part, position) if has_rows else _read_lines(part, position):
        end = InputPosition(
            position.file, position.offset + sum(map(len, lines)), position.line + len(lines)
        )
        yield DocumentChunk(part.name, position.line, lines, part.format, end)
        position = end


def _is_document(config: "PreprocessConfig", part: InputPart) -> bool:
    return part.format == "text" and config.text_document == "file"


def _read_lines(part: InputPart, position: InputPosition) -> Iterator[list[bytes]]:
    """Yield the lines that begin between ``position`` and the end of the part."""
    offset = position.offset
    end = sys.maxsize if part.end is None else part.end
    with _opened_input(part.url) as file:
        if not file.seekable():
            deque(islice(file, position.line - 1), maxlen=0)
        elif (
            position.line == 1 and offset > 0
        ):  # it may be inside a line, which belongs to the previous part
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        else:
            file.seek(offset)
        while offset < end and (lines := _lines_within(file, end - offset)):
            yield lines
            offset += sum(map(len, lines))


def _lines_within(file: io.BufferedReader, size: int) -> list[bytes]:
    """Yield the lines that begin within the next ``size`` bytes, about a megabyte at a time."""
    # `readlines` stops after the line that exceeds its limit
    return file.readlines(min(CHUNK_BYTES, size - 1)) if size > 1 else file.readlines(1)[:1]


def _read_rows(
    config: "PreprocessConfig", part: InputPart, position: InputPosition
) -> Iterator[list[bytes]]:
    lines: list[bytes] = []
    size = 0
    rows = _hub_rows(part) if part.url.startswith(HUB) else _table_rows(config, part)
    for row in islice(rows, position.line - 1, None):
        lines.append(json.dumps(row, ensure_ascii=False, default=str).encode())
        size += len(lines[-1])
        if size >= CHUNK_BYTES:
            yield lines
            lines = []
            size = 0
    if lines:
        yield lines


def _table_rows(config: "PreprocessConfig", part: InputPart) -> Iterator[dict[str, Any]]:
    with _opened_table(part.url) as table:
        groups = list(range(part.start, table.num_row_groups if part.end is None else part.end))
        only = part.format != "chat" and config.json_key in table.schema_arrow.names
        for batch in table.iter_batches(
            256, row_groups=groups, columns=[config.json_key] if only else None
        ):
            yield from batch.to_pylist()


def _hub_rows(part: InputPart) -> Iterator[dict[str, Any]]:
    stream = _hub_source(part.url)._load()
    for shard_index in range(part.start, stream.num_shards if part.end is None else part.end):
        yield from stream.shard(stream.num_shards, shard_index, contiguous=True)


def _hub_source(url: str) -> HubSource:
    dataset, _, query = url.removeprefix(HUB).partition("?")
    values = dict(parse_qsl(query))
    if values.keys() - {"name", "split", "revision"} or not (
        "revision" in values or Path(dataset).is_dir()
    ):
        raise UserError(
            f"--input={url}: write hub:ID?revision=COMMIT, followed by &name=SUBSET or &split=SPLIT if they are "
            f"needed; without a revision the dataset may change between two runs"
        )
    return HubSource(
        dataset,
        values.get("name"),
        values.get("split", "train"),
        values.get("revision"),
        streaming=True,
    )


def _find_parts(url: str, kind: Format | None) -> list[InputPart]:
    if url.startswith(HUB):
        return [InputPart(url, kind or "jsonl", 0, _hub_source(url).revision or "")]
    with _naming_input(url):
        files, path = _file_system_of(url)
        if "*" in url:
            names = sorted(files.glob(path))
            if not names:
                raise UserError(f"--input={url} matches no file: check the pattern")
            return [
                part for name in names for part in _find_parts(files.unstrip_protocol(name), kind)
            ]
        info = files.info(path)
    if info["type"] == "directory":
        raise UserError(
            f"--input={url} is not a file but a directory: name its files, such as '{url}/*.jsonl'"
        )
    stamp = next(
        (info[key] for key in ("ETag", "etag", "mtime", "LastModified", "created") if key in info),
        "",
    )
    return [
        InputPart(
            url.removeprefix("file://"),
            kind or _format_of(url),
            info["size"] or 0,
            f"{info['size']} {stamp}",
        )
    ]


def _format_of(url: str) -> Format:
    plain = Path(url).with_suffix("") if Path(url).suffix in COMPRESSED else Path(url)
    if plain.suffix not in SUFFIXES:
        known = " ".join([*SUFFIXES, *(f".jsonl{ending}" for ending in COMPRESSED)])
        raise UserError(
            f"the format of {url} is unknown (known endings: {known}): add --format jsonl, text or chat"
        )
    return SUFFIXES[plain.suffix]


def _divide_part(config: "PreprocessConfig", part: InputPart, size: int) -> list[InputPart]:
    """Divide the input into pieces of about ``size`` bytes, if it can be read from any position."""
    with _naming_input(part.url):
        if part.url.startswith(HUB):
            return [
                part._replace(start=at, end=at + 1)
                for at in range(_hub_source(part.url)._load().num_shards)
            ]
        if part.url.endswith(TABLE):
            with _opened_table(part.url) as table:
                sizes = [
                    table.metadata.row_group(at).total_byte_size
                    for at in range(table.num_row_groups)
                ]
            return [
                part._replace(start=at, end=at + 1, size=max(piece_size, 1))
                for at, piece_size in enumerate(sizes)
            ]
    if not part.size or Path(part.url).suffix in COMPRESSED or _is_document(config, part):
        return [part]
    return [
        part._replace(start=start, end=end, size=end - start)
        for start, end in pairwise([*range(0, part.size, size), part.size])
    ]


def _file_system_of(url: str) -> tuple[Any, str]:
    import fsspec

    return fsspec.core.url_to_fs(url)


@contextmanager
def _opened_input(url: str) -> Iterator[io.BufferedReader]:
    import pyarrow

    files, path = _file_system_of(url)
    with files.open(path, "rb") if "://" in url else Path(url).open("rb") as raw:
        if (
            Path(url).suffix in COMPRESSED
        ):  # not zstandard, which accepts a truncated file as complete
            with pyarrow.CompressedInputStream(raw, COMPRESSED[Path(url).suffix]) as stream:
                yield io.BufferedReader(stream, CHUNK_BYTES)
        else:
            yield raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, CHUNK_BYTES)


@contextmanager
def _opened_table(url: str) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    files, path = _file_system_of(url)
    with files.open(path, "rb") as raw, ParquetFile(raw) as table:
        yield table


@contextmanager
def _naming_input(url: str) -> Iterator[None]:
    """Name the input in errors of the file system, whose types differ from store to store."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"--input={url} cannot be read ({reason}): check the path, that the file is complete, and of a URL the "
            f"scheme, its package for fsspec and the credentials in the environment"
        ) from error
