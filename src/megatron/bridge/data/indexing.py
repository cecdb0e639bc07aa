# SPDX-License-Identifier: Apache-2.0
"""An indexed dataset that is written piece by piece: it appears whole or not at all, and goes on after a kill.

Beside the final names there are meanwhile ``.bin.incomplete`` with the tokens, ``.idx.incomplete`` with the
lengths of documents (int32), and ``.progress.json``, which says how much of both is safely on disk, and where in
the input that was. A finished dataset keeps ``.source.json``, which says what it was made of.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.errors import UserError

SAVE_SECONDS = 10.0  # of work that a kill may cost
FINAL = (UserError, OSError)  # errors after which going on would meet the same again


class Place(NamedTuple):
    """Where in the input: number of the file, bytes read of it, number of the next line."""

    file: int = 0
    offset: int = 0
    line: int = 1


@dataclass
class Report:
    """What came out.

    Attributes:
        documents: documents written.
        tokens: tokens written, end-of-document tokens included.
        empty: lines and texts left out because they hold nothing.
        input_bytes: bytes read.
        seconds: time spent, without start-up (imports, loading the tokenizer).
        found: it was there already, made of the same content.
    """

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    input_bytes: int = 0
    seconds: float = 0.0
    found: bool = False

    def summary(self) -> str:
        """One line for people."""
        left_out = f", {self.empty:,} empty left out" if self.empty else ""
        speed = self.input_bytes / 1e6 / max(self.seconds, 1e-9)
        end = "made before, of the same content" if self.found else f"{speed:.1f} MB/s"
        return f"{self.documents:,} documents, {self.tokens:,} tokens{left_out}; {end}"


@dataclass
class State:
    """How far a dataset has come.

    Attributes:
        key: what it is made of, as a hash.
        place: what was read.
        report: what came of it.
    """

    key: str
    place: Place = field(default_factory=Place)
    report: Report = field(default_factory=Report)


class IndexWriter:
    """Writes ``prefix.bin`` and ``prefix.idx`` in Megatron-Core's format; a context manager.

    Left with an error of the input or the disk, nothing stays behind; left otherwise, or killed, the next writer
    of the same ``key`` goes on at ``state.place``.

    Args:
        prefix: output path without endings.
        dtype: of the tokens, uint16 or int32.
        key: what the dataset is made of, as a hash.
    """

    def __init__(self, prefix: Path, dtype: Any, key: str) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._tokens_path, self._lengths_path = (_beside(prefix, f"{end}.incomplete") for end in (".bin", ".idx"))
        self._progress, self._index = _beside(prefix, ".progress.json"), _beside(prefix, ".idx.new")
        self.state = State(key)
        self._saved = time.monotonic()

    def __enter__(self) -> "IndexWriter":
        try:
            self._prefix.parent.mkdir(parents=True, exist_ok=True)
            self.state = self._earlier() or self.state
            sizes = (self.state.report.tokens * self._dtype.itemsize, self.state.report.documents * 4)
            self._tokens, self._lengths = map(_cut_to, (self._tokens_path, self._lengths_path), sizes)
        except OSError as error:
            raise self._cannot_write(error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        try:
            if kind is None:
                self._finish()
            elif not issubclass(kind, FINAL):
                self._save()
        except OSError as found:
            raise self._cannot_write(found) from found
        finally:
            for file in (self._tokens, self._lengths):
                with suppress(OSError):  # what could not be flushed
                    file.close()
            if kind is None or issubclass(kind, FINAL):
                for path in (self._tokens_path, self._lengths_path, self._progress, self._index):
                    path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise self._cannot_write(error) from error

    def write(self, tokens: np.ndarray, lengths: list[int], empty: int, input_bytes: int, read: Place) -> None:
        """Append documents: their tokens one behind the other, and the length of each; ``read`` is then done."""
        self._tokens.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._lengths.write(np.array(lengths, np.int32).tobytes())
        report = self.state.report
        report.documents += len(lengths)
        report.tokens += len(tokens)
        report.empty += empty
        report.input_bytes += input_bytes
        self.state.place = read
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        now = time.monotonic()
        self.state.report.seconds += now - self._saved
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        write_text(self._progress, json.dumps(asdict(self.state)))
        self._saved = now

    def _earlier(self) -> State | None:
        """Where an interrupted writer of the same dataset stood."""
        try:
            state = _state(self._progress)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return state if state.key == self.state.key else None

    def _finish(self) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._save()
        lengths = np.fromfile(self._lengths_path, np.int32)
        if not len(lengths):
            return
        builder: Any = IndexedDatasetBuilder(os.devnull, dtype=self._dtype.type)
        builder.sequence_lengths, builder.document_indices = lengths, np.arange(len(lengths) + 1)
        builder.finalize(str(self._index))
        with self._index.open("rb") as file:
            os.fsync(file.fileno())
        final = [_beside(self._prefix, end) for end in (".bin", ".idx", ".source.json")]
        for path in final[1:]:
            path.unlink(missing_ok=True)  # an old index must never describe new tokens
        self._tokens_path.replace(final[0])
        self._index.replace(final[1])
        write_text(final[2], json.dumps(asdict(self.state)))

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(
            f"cannot write {_beside(self._prefix, '.bin')}: {error.strerror}: free space or write elsewhere"
        )


def _state(path: Path) -> State:
    saved = json.loads(path.read_text())
    return State(saved["key"], Place(*saved["place"]), Report(**saved["report"]))


def made_of(prefix: Path) -> State | None:
    """What the dataset at ``prefix`` was made of; None if there is none, or nobody knows."""
    if not all(_beside(prefix, end).is_file() for end in (".bin", ".idx")):
        return None
    try:
        return _state(_beside(prefix, ".source.json"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _beside(prefix: Path, ending: str) -> Path:
    return Path(f"{prefix}{ending}")


def _cut_to(path: Path, size: int) -> Any:
    """The file, opened behind its first ``size`` bytes, without the rest."""
    file = path.open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file
