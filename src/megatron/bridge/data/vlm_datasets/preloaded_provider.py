# SPDX-License-Identifier: Apache-2.0
"""Conversations with images in files of the user's choice."""

from dataclasses import dataclass
from pathlib import Path

from megatron.bridge.data.dataset_config import Split
from megatron.bridge.data.finetuning.sft_config import SFTDatasetConfig
from megatron.bridge.data.records.sources import FileSource
from megatron.bridge.utils.errors import UserError


@dataclass(kw_only=True)
class PreloadedVLMConversationProvider(SFTDatasetConfig):
    """Records in LLaVA's JSON or in the formats of ``FinetuningDatasetConfig``, and images below ``image_folder``."""

    train_data_path: str  # file with the training records
    valid_data_path: str | None = None  # file with the validation records; None needs ``do_validation=False``
    test_data_path: str | None = None  # file with the test records; None skips testing
    image_folder: str | None = None  # where the paths of images start; None is the folder of ``train_data_path``

    @property
    def media_folder(self) -> str:
        return self.media_root or self.image_folder or str(Path(self.train_data_path).parent)

    def problems(self) -> list[str]:
        found = super().problems()
        if self.media_root and self.image_folder and self.media_root != self.image_folder:
            found.append(
                f"dataset.image_folder={self.image_folder} and dataset.media_root={self.media_root} mean the "
                "same: set one of them"
            )
        return found

    def check_sources(self) -> None:
        for name in ("train_data_path", "valid_data_path", "test_data_path"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise UserError(f"dataset.{name}={path} is not a file: check the path")
        if self.image_folder is not None and not Path(self.image_folder).is_dir():
            raise UserError(f"dataset.image_folder={self.image_folder} is not a directory: check the path")

    def source(self, split: Split) -> FileSource | None:
        """The file of the split."""
        path = {"train": self.train_data_path, "valid": self.valid_data_path, "test": self.test_data_path}[split]
        if path is None and split == "valid":
            raise UserError(
                "dataset.valid_data_path is not set: give a file, or set dataset.do_validation=false and "
                "validation.eval_iters=0"
            )
        return None if path is None else FileSource(Path(path))
