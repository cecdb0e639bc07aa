# SPDX-License-Identifier: Apache-2.0
"""The configs of datasets of records that are tokenized before the first step: of a folder, of the hub, and blends."""

import os
import re
from abc import abstractmethod
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from megatron.bridge.data.dataset_config import (
    DatasetConfig,
    DatasetRequest,
    Split,
    Splits,
    too_small,
)
from megatron.bridge.data.records.record_config import RecordDatasetConfig
from megatron.bridge.data.records.sources import (
    SUFFIXES,
    FileSource,
    HoldOutSource,
    HubSource,
    LimitedSource,
    RecordSource,
    RenamedSource,
    is_saved_dataset,
)
from megatron.bridge.utils import storage
from megatron.bridge.utils.config.ranges import WORKERS
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.records.encoding import RecordEncoder
    from megatron.bridge.data.records.preparation import PreparedSamples
    from megatron.bridge.data.tokenizer import Tokenizer


FILE_STEMS: dict[Split, str] = {"train": "training", "valid": "validation", "test": "test"}


@dataclass(kw_only=True)
class SFTDatasetConfig(RecordDatasetConfig):
    """The base class of datasets of records that are tokenized before the first step."""

    has_epochs: ClassVar[bool] = True

    max_train_samples: int | None = None
    """Maximum number of records for training; None uses all."""
    max_validation_samples: int | None = None
    """Maximum number of records for validation."""
    max_test_samples: int | None = None
    """Maximum number of records for testing."""
    do_validation: bool = True
    """False needs no validation data and skips validation."""
    do_test: bool = True
    """False needs no test data and skips testing."""
    prepared_dir: str | None = None
    """Folder that keeps tokenized samples for later runs. They are made again when the records, the tokenizer, or
    any setting that they depend on changes. All nodes must share the folder."""
    workers: Annotated[int, WORKERS] = 1
    """Number of processes that tokenize."""

    columns: dict[str, str] = field(default_factory=dict[str, str])
    """New names for keys of the records, such as ``{question: prompt, answer: completion}``."""

    counted: "PreparedSamples | None" = field(default=None, init=False, repr=False, compare=False)
    """The training samples that ``count_rows`` has tokenized; the next build takes them."""

    @abstractmethod
    def source(self, split: Split) -> RecordSource | None:
        """The records of a split; None if there are none."""

    def uses_split(self, split: Split) -> bool:
        """Return whether the settings ask for a split, which the data may not have."""
        return {"train": True, "valid": self.do_validation, "test": self.do_test}[split]

    def limited_source(self, split: Split) -> RecordSource | None:
        """Return the records of a split that the run uses; None without any."""
        limit = {
            "train": self.max_train_samples,
            "valid": self.max_validation_samples,
            "test": self.max_test_samples,
        }[split]
        source = self.source(split) if self.uses_split(split) else None
        if source is not None and self.columns:
            source = RenamedSource(source, self.columns)
        return source if source is None or limit is None else LimitedSource(source, limit)

    def encoder(self, tokenizer: "Tokenizer") -> "RecordEncoder":
        from megatron.bridge.data.records.encoding import RecordEncoder  # imports torch

        return RecordEncoder(tokenizer, self.encoding_rules())

    def problems(self) -> list[str]:
        counts = ("workers", "max_train_samples", "max_validation_samples", "max_test_samples")
        names = list(self.columns.values())
        twice = sorted({name for name in names if names.count(name) > 1})
        problems = [
            f"dataset.columns gives two keys the name {name}: choose another one" for name in twice
        ]
        return [*super().problems(), *too_small(self, *counts), *problems]

    def build(self, request: DatasetRequest) -> Splits:
        from megatron.bridge.data.finetuning.builder import (
            build_finetuning_datasets,
        )  # imports torch

        self.finalize()
        return build_finetuning_datasets(self, request)

    def count_rows(self, tokenizer: "Tokenizer") -> int:
        from megatron.bridge.data.finetuning.builder import prepare_split  # imports torch

        self.finalize()
        self.counted = prepared = prepare_split(self, "train", tokenizer)
        train: Any = self.build(DatasetRequest((1, 0, 0), tokenizer, image_share=None)).train
        self.counted = prepared
        return len(train.rows)


@dataclass(kw_only=True)
class FinetuningDatasetConfig(SFTDatasetConfig):
    """Records in the files ``training``, ``validation`` and ``test`` of a folder.

    Each is a ``.jsonl``, ``.parquet`` or ``.arrow`` file. Without a file for validation or test, there is none; a note
    says so. If the folder also has files of records under other names, a missing file is refused.
    """

    dataset_root: str
    """The folder."""

    @property
    def media_folder(self) -> str:
        return self.media_root or str(storage.local(self.dataset_root))

    def held_out_from(self, source: str) -> "FinetuningDatasetConfig":
        """Return a config that validates on the file ``validation`` of the folder ``source``."""
        return replace(self, dataset_root=source, do_validation=True)

    def check_sources(self) -> None:
        if not storage.fetch(self.dataset_root).is_dir():
            raise UserError(
                f"dataset.dataset_root={self.dataset_root} is not a directory: check the path"
            )

    def source(self, split: Split) -> RecordSource | None:
        """The file of a split; a folder without validation or test file trains without them."""
        folder = storage.fetch(self.dataset_root)
        stem = FILE_STEMS[split]
        candidates = [folder / f"{stem}{suffix}" for suffix in SUFFIXES]
        files = [path for path in candidates if path.is_file()]
        if len(files) > 1:
            raise UserError(
                f"{' and '.join(map(str, files))} both exist: remove or rename one of them"
            )
        is_optional = split != "train" and folder.is_dir() and not _other_records(folder)
        # a broken link, for one, is there and no file
        if is_optional and not any(map(os.path.lexists, candidates)):
            return None
        if not files:
            names = sorted(path.name for path in folder.iterdir())[:5] if folder.is_dir() else []
            switches = {
                "valid": ", or set dataset.do_validation=false",
                "test": ", or set dataset.do_test=false",
            }
            raise UserError(
                f"{folder} has no file {stem} with one of the endings {', '.join(SUFFIXES)} (it holds "
                f"{', '.join(names) or 'nothing'}): add it{switches.get(split, '')}"
            )
        return FileSource(files[0])


def _other_records(folder: Path) -> list[str]:
    """Return the files of records that are no split by their names, such as ``valid.jsonl``."""
    stems = set(FILE_STEMS.values())
    return [
        path.name for path in folder.iterdir() if path.suffix in SUFFIXES and path.stem not in stems
    ]


@dataclass(kw_only=True)
class BlendedDatasetConfig(DatasetConfig):
    """Several datasets for fine-tuning at once."""

    read_ahead: ClassVar[bool] = True
    masks_tokens: ClassVar[bool] = True

    datasets: list[SFTDatasetConfig]
    """The parts. All must have the ``seq_length`` of the blend and the same kind of rows."""
    weights: list[float]
    """Share of the rows that comes from each part. Without packing a row is a sample; a packed row is full of
    tokens, whatever the number of its samples."""

    @property
    def shuffle_seed(self) -> int:
        return self.datasets[0].shuffle_seed if self.datasets else 0

    @property
    def packed(self) -> bool:
        return any(dataset.packed for dataset in self.datasets)

    @property
    def joins_samples(self) -> bool:
        return any(dataset.joins_samples for dataset in self.datasets)

    def held_out_from(self, source: str) -> DatasetConfig:
        """Return a config that validates on ``source``, which is of the kind of the first part."""
        return self.datasets[0].held_out_from(source)

    def problems(self) -> list[str]:
        problems = super().problems()
        count = len(self.datasets)
        if not self.datasets:
            problems.append("dataset.datasets is empty: name at least one dataset")
        if len(self.weights) != count:
            problems.append(
                f"dataset.weights has {len(self.weights)} entries for {count} datasets: give one for each"
            )
        if any(not weight > 0 for weight in self.weights):
            problems.append(f"dataset.weights={self.weights}: all must be positive")
        for name in ("seq_length", "packed", "padding_free", "sequence_multiple"):
            values = {getattr(dataset, name) for dataset in self.datasets}
            expected = {self.seq_length} if name == "seq_length" else values
            if len(values | expected) > 1:
                problems.append(
                    f"dataset.datasets differ in {name}: set it to the same value in all of them"
                )
        return problems + [
            problem for index in range(count) for problem in self._part_problems(index)
        ]

    def _part_problems(self, index: int) -> list[str]:
        part = self.datasets[index]
        name = f"dataset.datasets[{index}]"
        problems = [
            f"{name}.{entry.name}={value} has no effect: set it on the blend"
            for entry in fields(DatasetConfig)
            if entry.name != "seq_length" and (value := getattr(part, entry.name)) != entry.default
        ]
        return problems + [f"{name}: {problem}" for problem in part.problems()]

    def check_sources(self) -> None:
        for dataset in self.datasets:
            dataset.check_sources()

    def build(self, request: DatasetRequest) -> Splits:
        from megatron.bridge.data.finetuning.builder import build_blended_datasets  # imports torch

        self.finalize()
        return build_blended_datasets(self, request)


def is_read_by_datasets(name: str) -> bool:
    """Whether ``name`` is what ``HFDatasetConfig`` reads, rather than a folder with a file for each split."""
    path = storage.fetch(name)
    if not path.exists():
        return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None  # the form of a hub id
    if path.is_file() or is_saved_dataset(path):
        return True
    return not any(path.glob(f"{FILE_STEMS['train']}.*")) and any(path.rglob("*.parquet"))


@dataclass(kw_only=True)
class HFDatasetConfig(SFTDatasetConfig):
    """Records that `datasets` loads, or those of one file."""

    dataset_name: str
    """Hub id, a folder that `datasets` saved, or a JSONL, JSON, Parquet or Arrow file."""
    dataset_subset: str | None = None
    """Configuration of the dataset, if it has several."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    streaming: bool = False
    """Read records as they are needed instead of loading complete splits first."""
    train_split: str = "train"
    """Name of the training split."""
    validation_split: str | None = None
    """Name of the validation split; None holds out ``val_proportion`` of the training split."""
    test_split: str | None = None
    """Name of the test split, required with ``do_test``."""
    val_proportion: float = 0.05
    """Share of the training records that is held out; ``seed`` selects them."""
    do_test: bool = False
    """Whether to test. It is False by default because many datasets have no test split."""

    def problems(self) -> list[str]:
        problems = super().problems()
        if not 0 < self.val_proportion < 1:
            problems.append(
                f"dataset.val_proportion={self.val_proportion}: it must be between 0 and 1"
            )
        if self.do_test and self.test_split is None:
            problems.append(
                "dataset.test_split is not set: name a split, or set dataset.do_test=false"
            )
        return problems

    @property
    def is_local(self) -> bool:
        """Whether ``dataset_name`` is a file or a folder on this machine."""
        return storage.fetch(self.dataset_name).exists()

    def held_out_from(self, source: str) -> "HFDatasetConfig":
        """Return a config that validates on the split ``validation_split`` of ``source``, or on all of a file."""
        is_file = storage.fetch(source).is_file()
        split = self.train_split if is_file else self.validation_split or "validation"
        return replace(
            self,
            dataset_name=source,
            dataset_subset=None,
            revision=None,
            validation_split=split,
            do_validation=True,
        )

    def check_sources(self) -> None:
        name = self.dataset_name
        if (storage.is_url(name) or name.startswith(("/", "./", "../", "~"))) and not self.is_local:
            raise UserError(f"dataset.dataset_name={name} does not exist: check the path")

    def source(self, split: Split) -> RecordSource | None:
        names = {"train": self.train_split, "valid": self.validation_split, "test": self.test_split}
        holds_out = self.do_validation and self.validation_split is None and split != "test"
        name = self.train_split if holds_out else names[split]
        if name is None:
            return None
        local_path = storage.fetch(self.dataset_name)
        place_name = str(local_path) if storage.is_url(self.dataset_name) else self.dataset_name
        full_source: RecordSource = HubSource(
            place_name, self.dataset_subset, name, self.revision, self.streaming
        )
        if local_path.is_file():
            full_source = FileSource(local_path)
        return (
            HoldOutSource(full_source, self.val_proportion, self.seed, split == "valid")
            if holds_out
            else full_source
        )
