# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face hub for fine-tuning."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.data.config import SFTDatasetConfig, Split
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.sources import Source


@dataclass(kw_only=True)
class HFDatasetConfig(SFTDatasetConfig):
    """Records that `datasets` loads.

    Attributes:
        dataset_name: hub id, or a folder that `datasets` saved.
        dataset_subset: configuration of the data set, where it has several.
        revision: branch, tag or commit of the hub.
        streaming: read records as they are needed instead of loading whole splits first.
        train_split: name of the split to train on.
        validation_split: name of the split to validate on; None holds ``val_proportion`` of the training split
            out.
        test_split: name of the split to test on, with ``do_test``.
        val_proportion: share of the training records that is held out; which ones depends on ``seed``.
        do_test: False by default, because many data sets have no such split.
    """

    dataset_name: str
    dataset_subset: str | None = None
    revision: str | None = None
    streaming: bool = False
    train_split: str = "train"
    validation_split: str | None = None
    test_split: str | None = None
    val_proportion: float = 0.05
    do_test: bool = False

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        found = super().problems()
        if not 0 < self.val_proportion < 1:
            found.append(f"dataset.val_proportion={self.val_proportion}: it must lie between 0 and 1")
        if self.do_test and self.test_split is None:
            found.append("dataset.test_split is not set: name a split, or set dataset.do_test=false")
        return found

    def check_sources(self) -> None:
        """A name that looks like a folder must be one."""
        name = self.dataset_name
        if name.startswith(("/", "./", "../", "~")) and not Path(name).is_dir():
            raise UserError(f"dataset.dataset_name={name} is not a directory: check the path")

    def source(self, split: Split) -> "Source | None":
        """A split, or its part."""
        from megatron.bridge.data.sources import HubSource, Part

        names = {"train": self.train_split, "valid": self.validation_split, "test": self.test_split}
        divided = self.do_validation and self.validation_split is None and split != "test"
        name = self.train_split if divided else names[split]
        if name is None:
            return None
        whole = HubSource(self.dataset_name, self.dataset_subset, name, self.revision, self.streaming)
        return Part(whole, self.val_proportion, self.seed, split == "valid") if divided else whole
