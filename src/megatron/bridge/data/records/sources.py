# SPDX-License-Identifier: Apache-2.0
"""Sources of records: JSONL, Parquet and Arrow files, folders saved by `datasets`, and the hub."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from megatron.bridge.data.records.jsonl import (
    open_data,
    raise_or_skip,
    read_json,
    read_jsonl,
)
from megatron.bridge.utils.errors import UserError, one_line

JSON_SUFFIXES = (".jsonl", ".json")
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
SUFFIXES = (*JSON_SUFFIXES, *TABLES)

LocatedRecord = tuple[str, dict[str, Any]]  # the place of a record (file and line), and the record


class RecordSource(Protocol):
    """An ordered collection of records."""

    @property
    def name(self) -> str: ...

    def records(self) -> Iterator[LocatedRecord]: ...

    def fingerprint(self) -> str:
        """Return a hash that changes whenever the records change."""
        ...


@dataclass(frozen=True)
class FileSource:
    """The records of one file, whose ending tells the format."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def records(self) -> Iterator[LocatedRecord]:
        """Lines of JSON, entries of a JSON list, or rows of a table, all numbered from 1."""
        if self.path.suffix in JSON_SUFFIXES:
            yield from (read_json if self.path.suffix == ".json" else read_jsonl)(self.path)
            return
        if self.path.suffix not in TABLES:
            raise UserError(f"{self.path}: the ending is unknown: use one of {', '.join(SUFFIXES)}")
        open_data(self.path).close()
        yield from _numbered_rows(
            str(self.path), _stream_table(TABLES[self.path.suffix], self.path)
        )

    def fingerprint(self) -> str:
        with open_data(self.path) as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class TableRow(dict[str, Any]):
    """A record that was a row of a table, whose objects all have the same keys: null stands for an absent one."""


def _numbered_rows(name: str, rows: Any) -> Iterator[LocatedRecord]:
    for row_number, row in enumerate(rows, start=1):
        yield f"{name}: row {row_number}", TableRow(row)


FREE_KEYS = ("tools", "tool_calls", "chat_template_kwargs")
"""Keys whose objects have other keys in each record."""


def without_filled_nulls(record: Any) -> Any:
    """Return ``record`` without null values in the objects under ``FREE_KEYS``, wherever these are.

    A table gives the arguments of each tool call the keys of all tools. What the table has added cannot be told from a
    null that was there.
    """
    if isinstance(record, list):
        return [without_filled_nulls(entry) for entry in record]
    if not isinstance(record, Mapping):
        return record
    return {
        key: _without_nulls(value) if key in FREE_KEYS else without_filled_nulls(value)
        for key, value in record.items()
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}


def _stream_table(kind: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table file, without a copy in the cache of `datasets`."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        if kind == "parquet" and not _parquet_rows(path):
            return  # `datasets` would report an empty file as broken
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        yield from with_encoded_audio(rows)
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(f"{path} is not a {kind} file: {one_line(error)}") from error


def with_encoded_audio(rows: Any) -> Any:
    """A dataset of `datasets` whose columns of audio have the bytes or path of each file.

    `datasets` would decode them with torchcodec, and not as transformers' processors do.
    """
    import datasets

    encoded = datasets.Audio(decode=False)
    for name, feature in (rows.features or {}).items():
        if isinstance(feature, datasets.Audio):
            rows = rows.cast_column(name, encoded)
        elif isinstance(getattr(feature, "feature", None), datasets.Audio):
            rows = rows.cast_column(name, datasets.List(encoded))
    return rows


def _parquet_rows(path: Path) -> int:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        return file.metadata.num_rows


def is_saved_dataset(folder: Path) -> bool:
    """Return whether ``save_to_disk`` of `datasets` wrote the folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


@dataclass(frozen=True)
class HubSource:
    """One split of a dataset that `datasets` loads: a hub id, or a folder written by ``save_to_disk``."""

    dataset_name: str  # hub id or folder
    subset: str | None
    split: str
    revision: str | None = None
    streaming: bool = False  # read rows as they are needed instead of loading the whole split first

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.dataset_name, self.subset, self.split) if part)

    def records(self) -> Iterator[LocatedRecord]:
        return _numbered_rows(self.name, with_encoded_audio(self._load()))

    def fingerprint(self) -> str:
        """Return the fingerprint of `datasets`, or the revision of a stream, which must be set."""
        if not self.streaming:
            return str(self._load()._fingerprint)
        if self.revision is None:
            raise UserError(
                f"dataset.prepared_dir with dataset.streaming=True needs dataset.revision, because the content of "
                f"{self.dataset_name} may change: set dataset.revision to a commit"
            )
        return f"{self.name}@{self.revision}"

    def _load(self) -> Any:
        import datasets
        from datasets.exceptions import DatasetsError

        if is_saved_dataset(Path(self.dataset_name)):
            return self._load_saved(datasets)
        try:
            return datasets.load_dataset(
                self.dataset_name,
                self.subset,
                split=self.split,
                revision=self.revision,
                streaming=self.streaming,
            )
        except (OSError, ValueError, DatasetsError) as error:
            name = f"dataset.dataset_name={self.dataset_name} (split {self.split})"
            raise UserError(f"{name} cannot be loaded: {one_line(error)}") from error

    def _load_saved(self, datasets: Any) -> Any:
        loaded = datasets.load_from_disk(self.dataset_name)
        if isinstance(loaded, datasets.DatasetDict):
            if self.split not in loaded:
                raise UserError(
                    f"{self.dataset_name} has no split {self.split}: choose one of {', '.join(loaded)}"
                )
            return loaded[self.split]
        if self.split != "train":
            raise UserError(
                f"{self.dataset_name} holds a single split: call it train, not {self.split}"
            )
        return loaded


@dataclass(frozen=True)
class HoldOutSource:
    """A random part of another source: the records that are held out, or the rest."""

    source: RecordSource
    share: float  # share of the records that is held out
    seed: int
    held_out: bool

    @property
    def name(self) -> str:
        return f"{self.source.name} (held out)" if self.held_out else self.source.name

    def records(self) -> Iterator[LocatedRecord]:
        """Choose records by their index alone, so that a stream can be divided, too."""
        for index, record in enumerate(self.source.records()):
            if (_random_fraction(self.seed, index) < self.share) == self.held_out:
                yield record

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}-{self.share}-{self.seed}-{self.held_out}"


@dataclass(frozen=True)
class LimitedSource:
    """The first ``count`` records of another source."""

    source: RecordSource
    count: int

    @property
    def name(self) -> str:
        return f"{self.source.name} (first {self.count:,})"

    def records(self) -> Iterator[LocatedRecord]:
        return islice(self.source.records(), self.count)

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}-{self.count}"


@dataclass(frozen=True)
class RenamedSource:
    """The records of another source with some of their keys renamed."""

    source: RecordSource
    columns: Mapping[str, str]  # from a key of the records to its new name

    @property
    def name(self) -> str:
        return self.source.name

    def records(self) -> Iterator[LocatedRecord]:
        for location, record in self.source.records():
            try:
                renamed = self._rename(location, record)
            except UserError as error:
                raise_or_skip(error)
            else:
                yield location, renamed

    def _rename(self, location: str, record: dict[str, Any]) -> dict[str, Any]:
        if missing := [key for key in self.columns if key not in record]:
            raise UserError(
                f"{location}: there is no {missing[0]}, which dataset.columns names; the record has "
                f"{', '.join(record)}"
            )
        unnamed = {key: value for key, value in record.items() if key not in self.columns}
        if taken := [name for name in self.columns.values() if name in unnamed]:
            raise UserError(
                f"{location}: the record has the key {taken[0]}, and dataset.columns renames another "
                "key to it: rename both"
            )
        renamed = {new: record[old] for old, new in self.columns.items()}
        return type(record)({**unnamed, **renamed})

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}-{dict(self.columns)}"


def _random_fraction(seed: int, index: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
