# SPDX-License-Identifier: Apache-2.0
"""The config of datasets on the Hugging Face hub, and of single files."""

import re
from dataclasses import dataclass

from megatron.bridge.data.dataset_config import Split
from megatron.bridge.data.finetuning.sft_config import FILE_STEMS, SFTDatasetConfig
from megatron.bridge.data.records.sources import FileSource, HoldOutSource, HubSource, RecordSource, is_saved_dataset
from megatron.bridge.utils import storage
from megatron.bridge.utils.errors import UserError


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
    """Read records as they are needed instead of loading whole splits first."""
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
        found = super().problems()
        if not 0 < self.val_proportion < 1:
            found.append(f"dataset.val_proportion={self.val_proportion}: it must be between 0 and 1")
        if self.do_test and self.test_split is None:
            found.append("dataset.test_split is not set: name a split, or set dataset.do_test=false")
        return found

    @property
    def is_local(self) -> bool:
        """Whether ``dataset_name`` is a file or a folder on this machine."""
        return storage.fetch(self.dataset_name).exists()

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
        place = storage.fetch(self.dataset_name)
        place_name = str(place) if storage.is_url(self.dataset_name) else self.dataset_name
        whole: RecordSource = HubSource(place_name, self.dataset_subset, name, self.revision, self.streaming)
        if place.is_file():
            whole = FileSource(place)
        return HoldOutSource(whole, self.val_proportion, self.seed, split == "valid") if holds_out else whole
