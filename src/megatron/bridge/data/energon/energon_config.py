# SPDX-License-Identifier: Apache-2.0
"""The config of WebDatasets and blends of them. It can be imported without Energon."""

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.bridge.data.dataset_config import (
    SPLITS,
    DatasetRequest,
    StreamingDatasetConfig,
    too_small,
)
from megatron.bridge.data.records.record_config import RecordDatasetConfig
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import installed, missing_message

if TYPE_CHECKING:
    from megatron.bridge.data.loaders import BatchShard, Iterators

INDEX_FOLDER = ".nv-meta"
# Besides the data itself, the order of samples depends on these fields.
ORDER = ("seed", "num_workers", "shuffle_buffer_size", "max_samples_per_sequence")
PACKING = (
    "packing_buffer_size",
    "seq_length",
    "truncation",
    "train_on",
    "train_on_eos",
    "split_turns",
)
PACKING_IMAGES = ("min_pixels", "max_pixels", "max_image_tokens", "fps", "max_frames")


@dataclass(kw_only=True)
class EnergonProvider(RecordDatasetConfig, StreamingDatasetConfig):
    """Records of a dataset that ``energon prepare`` indexed, or of a blend of several.

    A sample has a ``json`` part with a record in one of the fine-tuning formats, or a ``txt`` part with text. Parts
    that are images or videos (``0.jpg``) are those that the record names, or, without names, all in their order.
    Records are tokenized as they are read. A run resumes at the exact sample at which it was saved, with any
    number of data-parallel ranks that divides ``readers``.
    """

    # records are tokenized as they are read, by a function of the user's: only ``num_workers`` read ahead
    read_ahead: ClassVar[bool] = False

    path: str
    """Folder of a WebDataset, a ``.jsonl`` file, or a metadataset (YAML) that blends several."""
    readers: int | None = None
    """Number of independent streams that the data is divided into. The number of data-parallel ranks must divide
    it, and it must divide the global batch size. None: one stream for each data-parallel rank."""
    shuffle_buffer_size: int = 1000
    """Number of samples from which each reader draws the next one; 1 keeps the order."""
    max_samples_per_sequence: int | None = 100
    """Maximum number of samples read in sequence before a reader jumps elsewhere; None reads complete shards."""
    packing_buffer_size: int | None = None
    """Number of samples that each reader packs at a time, with ``packed_sequence_specs``."""
    train_split: str = "train"
    """Name of the training split."""
    validation_split: str | None = "val"
    """Name of the validation split; None for none."""
    test_split: str | None = None
    """Name of the test split; None for none."""

    @property
    def media_folder(self) -> str:
        return self.media_root or self.path

    def problems(self) -> list[str]:
        counts = (
            "readers",
            "shuffle_buffer_size",
            "max_samples_per_sequence",
            "packing_buffer_size",
        )
        problems = [*super().problems(), *too_small(self, *counts)]
        if self.dataloader_type != "single":
            problems.append(
                f"dataset.dataloader_type={self.dataloader_type!r} has no effect on a stream: remove it, and set "
                f"dataset.shuffle_buffer_size instead"
            )
        for name in ("validation_split", "test_split"):
            if self.path.endswith(".jsonl") and (value := getattr(self, name)) is not None:
                problems.append(  # Energon would use the entire file for each split
                    f"dataset.{name}={value!r}: {self.path} has no splits, so the run would be evaluated on its "
                    f"training records; set it to null, or name a file for each split in a metadataset"
                )
        if self.packed and self.packing_buffer_size is None:
            problems.append(
                "dataset.packing_buffer_size is not set: set it to the number of samples that each reader packs "
                "at a time, such as 1000"
            )
        if self.packing_buffer_size is not None and not self.packed:
            problems.append(
                f"dataset.packing_buffer_size={self.packing_buffer_size} has no effect without "
                f"dataset.packed_sequence_specs: remove it, or set packed_sequence_size"
            )
        return problems

    def check_sources(self) -> None:
        if not installed("megatron.energon"):
            missing = missing_message(
                "megatron-energon", "dataset=EnergonProvider", "energon", is_setting=False
            )
            raise UserError(f"{missing}, or use FinetuningDatasetConfig")
        if "://" in self.path:
            return
        path = Path(self.path)
        if not path.exists():
            raise UserError(f"dataset.path={self.path} does not exist: check the path")
        if path.is_dir() and not (path / INDEX_FOLDER).is_dir():
            raise UserError(
                f"dataset.path={self.path} has no index ({INDEX_FOLDER}): run `energon prepare {self.path}` first"
            )

    def iterators(
        self, request: DatasetRequest, shard: "BatchShard", consumed: tuple[int, int]
    ) -> "Iterators":
        """Iterators from the first sample on. To resume, load the saved state into ``train``."""
        from megatron.bridge.data.energon.reader import open_reader  # imports torch and Energon
        from megatron.bridge.data.loaders import Iterators
        from megatron.bridge.data.streams import StreamingBatchIterator

        self.finalize()
        self.check_sources()
        if (
            shard.micro_batch_size > 1 and request.image_share
        ):  # several readers decode the images of a microbatch
            request = replace(request, image_share=(0, 1))
        readers = self.readers or shard.dp_size
        names = (self.train_split, self.validation_split, self.test_split)
        fingerprint = self.fingerprint(readers)

        def batches(split: str, name: str | None, size: int, consumed: int) -> Any:
            if not size or name is None:
                return None
            opener = partial(open_reader, self, name, split == "train", request, readers)
            return StreamingBatchIterator(
                f"{self.path} ({name})", opener, readers, shard, fingerprint, consumed
            )

        return Iterators(*map(batches, SPLITS, names, request.sizes, (consumed[0], 0, 0)))

    def fingerprint(self, readers: int) -> dict[str, Any]:
        """Everything that must be unchanged for a saved position in the data to be valid, by key."""
        keys = ORDER + (PACKING + PACKING_IMAGES if self.packed else ())
        values = {f"dataset.{key}": getattr(self, key) for key in keys}
        content = _content_hash(Path(self.path)) or self.path  # a folder may be moved
        return values | {"dataset.readers": readers, "content of dataset.path": content}


def _content_hash(path: Path) -> str | None:
    """A hash that changes with the splits, the index or the blend; None if the data is remote."""
    files = [*sorted((path / INDEX_FOLDER).glob("*.yaml")), path / INDEX_FOLDER / ".info.json"]
    present = [file for file in (files if path.is_dir() else [path]) if file.is_file()]
    if not present:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for file in present:
        digest.update(
            file.read_bytes() if file.suffix != ".jsonl" else str(file.stat().st_size).encode()
        )
    return digest.hexdigest()
