# SPDX-License-Identifier: Apache-2.0
"""Write an indexed dataset atomically, so that a killed run can resume.

During the writing, three other files are next to the final names: ``.bin.incomplete`` with the tokens,
``.idx.incomplete`` with the document lengths (int32), and ``.progress.json`` with the sizes of both that are safely
on disk and the position in the input. A finished dataset has ``.source.json``, which identifies its sources.
"""

import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.errors import UserError

DIGEST_BLOCK = 1 << 16
DIGEST_BLOCKS = 16
"""Number of blocks to read of a file above 1 MiB, including the first and the last; smaller files are read whole."""


def digest(path: Path) -> str:
    """Return a hash of a file's size and of up to ``DIGEST_BLOCKS`` evenly spaced blocks."""
    hasher = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    hasher.update(str(size).encode())
    last = max(size - DIGEST_BLOCK, 0)
    count = min(DIGEST_BLOCKS, -(-size // DIGEST_BLOCK))
    with path.open("rb") as file:
        for block in range(count):
            file.seek(last * block // max(count - 1, 1))
            hasher.update(file.read(DIGEST_BLOCK))
    return hasher.hexdigest()


def check_digests(prefix: str, written: dict[str, str]) -> None:
    """Compare the files of a corpus with the digests from the time of writing.

    Args:
        prefix: Path of the corpus without endings.
        written: Digest by ending. Corpora of other tools have none.
    """
    for ending, expected in written.items():
        path = Path(prefix + ending)
        if not path.is_file() or digest(path) != expected:
            state = "has changed" if path.is_file() else "is missing"
            raise UserError(
                f"the corpus {path} {state} since `megatron-bridge data preprocess` wrote it: copy or write it again, "
                f"or delete {prefix}.source.json if the change is intended"
            )


SAVE_SECONDS = 10.0  # the most work that a kill may lose
BLOCK = 1 << 20  # documents whose index is in memory at once
INDEX_MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, documents and one
DTYPE_CODES = {2: 8, 4: 4}  # Megatron-Core's codes of uint16 and int32, by their bytes
FINAL = (UserError, OSError)  # a resumed run would fail again with these, so the files are removed


class InputPosition(NamedTuple):
    file: int = 0
    offset: int = 0
    line: int = 1  # number of the next line


class EncodedDocuments(NamedTuple):
    tokens: np.ndarray  # all tokens, concatenated
    lengths: list[int]
    empty: int
    input_bytes: int
    end: InputPosition


@dataclass
class PreprocessReport:
    """Counts of the written data. The field names are keys of the files on disk."""

    documents: int = 0
    tokens: int = 0  # tokens written, including end-of-document tokens
    empty: int = 0
    input_bytes: int = 0
    seconds: float = 0.0  # time spent, without start-up (imports, loading the tokenizer)
    found: bool = False  # whether the dataset already existed, made from the same content

    def summary(self) -> str:
        left_out = f", {self.empty:,} empty ones left out" if self.empty else ""
        speed = self.input_bytes / 1e6 / max(self.seconds, 1e-9)
        end = "already made from the same content" if self.found else f"{speed:.1f} MB/s"
        return f"{self.documents:,} documents, {self.tokens:,} tokens{left_out}; {end}"


@dataclass
class WriterState:
    """The progress of writing a dataset. The field names are keys of the files on disk."""

    key: str  # hash of everything that determines the dataset
    place: InputPosition = field(
        default_factory=InputPosition
    )  # the input up to here has been written
    report: PreprocessReport = field(default_factory=PreprocessReport)
    digests: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # digests of the finished files, by ending
    facts: dict[str, Any] = field(
        default_factory=dict[str, Any]
    )  # of a shard: its node, hash and lengths

    @classmethod
    def load(cls, path: Path) -> "WriterState | None":
        """Read the state in a file; return None if there is no valid state."""
        try:
            saved = json.loads(path.read_text())
            position = InputPosition(*saved["place"])
            report = PreprocessReport(**saved["report"])
            return cls(
                saved["key"],
                position,
                report,
                dict(saved.get("digests", {})),
                dict(saved.get("facts", {})),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self)))


class DocumentLengths(NamedTuple):
    """Where the lengths of ``count`` documents lie in a file, as int32."""

    path: Path
    offset: int
    count: int


def write_index(path: Path, dtype: Any, files: list[DocumentLengths]) -> None:
    """Write Megatron-Core's index of consecutive documents with an amount of memory independent of their number."""
    width = np.dtype(dtype).itemsize
    count = sum(file.count for file in files)
    end = 0
    with path.open("wb") as index:
        index.write(HEADER.pack(INDEX_MAGIC, 1, DTYPE_CODES[width], count, count + 1))
        for lengths in _length_blocks(files):
            index.write(lengths.tobytes())
        for lengths in _length_blocks(files):
            ends = end + np.cumsum(lengths, dtype=np.int64) * width
            index.write((ends - lengths * np.int64(width)).tobytes())
            end = int(ends[-1])
        for first in range(0, count + 1, BLOCK):
            index.write(np.arange(first, min(first + BLOCK, count + 1)).tobytes())
        index.flush()
        os.fsync(index.fileno())


def _length_blocks(files: list[DocumentLengths]) -> Iterator[np.ndarray]:
    for path, offset, count in files:
        for first in range(0, count, BLOCK):
            yield np.fromfile(path, np.int32, min(BLOCK, count - first), offset=offset + 4 * first)


class IndexedDatasetWriter:
    """Context manager that writes ``prefix.bin`` and ``prefix.idx`` in Megatron-Core's format.

    After an error of the input or the disk, it removes its files. After another error or a kill, the next writer
    with the same ``key`` resumes at ``state.place``.

    Args:
        prefix: output path without endings.
        dtype: type of the tokens, uint16 or int32.
        key: hash of everything that determines the dataset.
    """

    def __init__(self, prefix: Path, dtype: Any, key: str) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._tokens_path, self._lengths_path = (
            _path_with_ending(prefix, f"{end}.incomplete") for end in (".bin", ".idx")
        )
        self._progress = _path_with_ending(prefix, ".progress.json")
        self._index = _path_with_ending(prefix, ".idx.new")
        self.state = WriterState(key)
        self._saved = time.monotonic()

    def __enter__(self) -> "IndexedDatasetWriter":
        try:
            self._prefix.parent.mkdir(parents=True, exist_ok=True)
            earlier = WriterState.load(self._progress)
            if earlier is not None and earlier.key == self.state.key:
                self.state = earlier
            report = self.state.report
            self._tokens = _open_at(self._tokens_path, report.tokens * self._dtype.itemsize)
            self._lengths = _open_at(self._lengths_path, report.documents * 4)
        except OSError as error:
            raise self._cannot_write(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        try:
            if kind is None:
                self._finish()
            elif not issubclass(kind, FINAL):
                self._save()
        except OSError as found:
            raise self._cannot_write(found) from found
        finally:
            for file in (self._tokens, self._lengths):
                with suppress(OSError):  # the data that could not be flushed
                    file.close()
            if kind is None or issubclass(kind, FINAL):
                for path in (self._tokens_path, self._lengths_path, self._progress, self._index):
                    path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise self._cannot_write(error) from error

    def write(self, documents: EncodedDocuments) -> None:
        self._tokens.write(documents.tokens.astype(self._dtype, copy=False).tobytes())
        self._lengths.write(np.array(documents.lengths, np.int32).tobytes())
        report = self.state.report
        report.documents += len(documents.lengths)
        report.tokens += len(documents.tokens)
        report.empty += documents.empty
        report.input_bytes += documents.input_bytes
        self.state.place = documents.end
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        now = time.monotonic()
        self.state.report.seconds += now - self._saved
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        self.state.save(self._progress)
        self._saved = now

    def _finish(self) -> None:
        self._save()
        write_index(
            self._index,
            self._dtype,
            [DocumentLengths(self._lengths_path, 0, self.state.report.documents)],
        )
        tokens, index, source = (
            _path_with_ending(self._prefix, end) for end in (".bin", ".idx", ".source.json")
        )
        for path in (index, source):
            path.unlink(missing_ok=True)  # an old index must never describe new tokens
        self._tokens_path.replace(tokens)
        self._index.replace(index)
        self.state.digests = {path.suffix: digest(path) for path in (tokens, index)}
        self.state.save(source)

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(
            f"cannot write {_path_with_ending(self._prefix, '.bin')}: {error.strerror}: free some "
            "space, or choose another "
            f"output prefix"
        )


def finished_state(prefix: Path) -> WriterState | None:
    """Return the state of the finished dataset at ``prefix``, or None if there is no dataset or no valid state."""
    if not all(_path_with_ending(prefix, end).is_file() for end in (".bin", ".idx")):
        return None
    return WriterState.load(_path_with_ending(prefix, ".source.json"))


def _path_with_ending(prefix: Path, ending: str) -> Path:
    return Path(f"{prefix}{ending}")


def _open_at(path: Path, size: int) -> Any:
    """Open the file for writing after its first ``size`` bytes, and discard the rest."""
    file = path.open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file
