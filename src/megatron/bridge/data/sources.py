# SPDX-License-Identifier: Apache-2.0
"""Where records come from: JSONL, Parquet and Arrow files, a folder that `datasets` saved, the hub."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from megatron.bridge.data.encoding import Numbered
from megatron.bridge.data.json_lines import parse_record
from megatron.bridge.utils.errors import UserError

JSON_SUFFIXES = (".jsonl", ".json")
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
SUFFIXES = (*JSON_SUFFIXES, *TABLES)
HASH_BYTES = 1 << 22


class Source(Protocol):
    """Records with the place where each stands."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def records(self) -> Iterator[Numbered]:
        """All records, in order.

        Raises:
            UserError: something cannot be read.
        """
        ...

    def fingerprint(self) -> str:
        """Changes whenever the records do."""
        ...


@dataclass(frozen=True)
class FileSource:
    """The records of one file, by its ending."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def records(self) -> Iterator[Numbered]:
        """Lines of JSON, or rows of a table; both with numbers from 1."""
        if self.path.suffix in JSON_SUFFIXES:
            yield from ((f"{self.path}:{number}", record) for number, record in read_jsonl(self.path))
            return
        if self.path.suffix not in TABLES:
            raise UserError(f"{self.path}: the ending is none of {', '.join(SUFFIXES)}")
        self._check_readable()
        yield from (
            (f"{self.path}: row {number}", dict(row))
            for number, row in enumerate(_stream(TABLES[self.path.suffix], self.path), start=1)
        )

    def fingerprint(self) -> str:
        """Hash of the content."""
        self._check_readable()
        digest = hashlib.blake2b(digest_size=16)
        with self.path.open("rb") as file:
            while block := file.read(HASH_BYTES):
                digest.update(block)
        return digest.hexdigest()

    def _check_readable(self) -> None:
        try:
            self.path.open("rb").close()
        except OSError as error:
            raise UserError(f"the data file {self.path} cannot be read: {error.strerror}") from error


def _stream(kind: str, path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a table file, without copying it to a cache."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        if kind == "parquet" and not _parquet_rows(path):
            return  # of which `datasets` says that it is broken
        yield from datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(f"{path} is no {kind} file: {' '.join(str(error).split())[:200]}") from error


def _parquet_rows(path: Path) -> int:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        return file.metadata.num_rows


@dataclass(frozen=True)
class HubSource:
    """One split of a data set that `datasets` loads: a hub id, or a folder written by ``save_to_disk``.

    Attributes:
        dataset_name: hub id or folder.
        subset: configuration of the data set, where it has several.
        split: name of the split.
        revision: branch, tag or commit of the hub.
        streaming: read rows as they are needed instead of loading the whole split first.
    """

    dataset_name: str
    subset: str | None
    split: str
    revision: str | None = None
    streaming: bool = False

    @property
    def name(self) -> str:
        """Name, subset and split."""
        return "/".join(part for part in (self.dataset_name, self.subset, self.split) if part)

    def records(self) -> Iterator[Numbered]:
        """Rows with numbers from 1."""
        for number, row in enumerate(self._load(), start=1):
            yield f"{self.name}: row {number}", dict(row)

    def fingerprint(self) -> str:
        """That of `datasets`; of a stream the revision, which must be given then."""
        if not self.streaming:
            return str(self._load()._fingerprint)
        if self.revision is None:
            raise UserError(
                f"dataset.prepared_dir with dataset.streaming=True needs dataset.revision: what "
                f"{self.dataset_name} holds today cannot be told from what it holds tomorrow"
            )
        return f"{self.name}@{self.revision}"

    def _load(self) -> Any:
        import datasets
        from datasets.exceptions import DatasetsError

        if Path(self.dataset_name).is_dir() and any(
            (Path(self.dataset_name) / name).is_file() for name in ("dataset_dict.json", "state.json")
        ):
            return self._saved(datasets)
        try:
            return datasets.load_dataset(
                self.dataset_name,
                self.subset,
                split=self.split,
                revision=self.revision,
                streaming=self.streaming,
            )
        except (OSError, ValueError, DatasetsError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"dataset.dataset_name={self.dataset_name} (split {self.split}) cannot be loaded: {reason}"
            ) from error

    def _saved(self, datasets: Any) -> Any:
        loaded = datasets.load_from_disk(self.dataset_name)
        if isinstance(loaded, datasets.DatasetDict):
            if self.split not in loaded:
                raise UserError(
                    f"{self.dataset_name} has the splits {', '.join(loaded)}, not {self.split}: choose one of them"
                )
            return loaded[self.split]
        if self.split != "train":
            raise UserError(f"{self.dataset_name} holds one split, to be called train, not {self.split}")
        return loaded


@dataclass(frozen=True)
class Part:
    """Some records of a source, chosen by their number and a seed.

    Attributes:
        source: what is divided.
        share: fraction of the records that is held out.
        seed: another seed holds out others.
        held_out: this is the held-out part, else the rest.
    """

    source: Source
    share: float
    seed: int
    held_out: bool

    @property
    def name(self) -> str:
        """What is divided, and which part this is."""
        return f"{self.source.name} ({self.share:.1%} held out)" if self.held_out else self.source.name

    def records(self) -> Iterator[Numbered]:
        """Each record is in one part, whatever the length of the source: a stream can be divided."""
        for number, numbered in enumerate(self.source.records()):
            if (_fraction(self.seed, number) < self.share) == self.held_out:
                yield numbered

    def fingerprint(self) -> str:
        """That of the source, and of the choice."""
        return f"{self.source.fingerprint()}-{self.share}-{self.seed}-{self.held_out}"


@dataclass(frozen=True)
class FirstRecords:
    """The first ``count`` records of a source."""

    source: Source
    count: int

    @property
    def name(self) -> str:
        """The source and the number."""
        return f"{self.source.name} (first {self.count:,})"

    def records(self) -> Iterator[Numbered]:
        """Stops reading behind the last one."""
        return islice(self.source.records(), self.count)

    def fingerprint(self) -> str:
        """That of the source, and the number."""
        return f"{self.source.fingerprint()}-{self.count}"


def _fraction(seed: int, number: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and objects of a JSONL file; empty lines are skipped.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"the data file {path} cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, parse_record(line, f"{path}:{number}")
