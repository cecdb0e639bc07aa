# SPDX-License-Identifier: Apache-2.0
"""WebDatasets and blends of them, read by Megatron Energon. Importing this needs neither Energon nor torch."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.bridge.data.config import SPLITS, DatasetRequest, RecordDatasetConfig, Splits
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional import installed

if TYPE_CHECKING:
    from megatron.bridge.data.loaders import BatchSizes, Iterators

__all__ = ["EnergonProvider"]

META = ".nv-meta"
# What the order of samples depends on, beside the data itself.
ORDER = ("seed", "num_workers", "shuffle_buffer_size", "max_samples_per_sequence")
PACKING = ("packing_buffer_size", "seq_length", "truncation", "train_on", "split_turns")


@dataclass(kw_only=True)
class EnergonProvider(RecordDatasetConfig):
    """Records from a data set that ``energon prepare`` indexed, or from a blend of several.

    A sample has a ``json`` part with a record in one of the forms of fine-tuning data, or a ``txt`` part with
    text. Records are tokenised as they are read. A run goes on at the very sample where it was saved, with any
    number of data-parallel ranks that divides ``readers``.

    Attributes:
        path: folder of a WebDataset, a ``.jsonl`` file, or a metadataset (YAML) that blends some of them.
        readers: into how many independent streams the data is divided; the number of data-parallel ranks must
            divide it, and it must divide the global batch size. None: one for each data-parallel rank.
        shuffle_buffer_size: samples among which each reader draws its next one; 1 keeps the order.
        max_samples_per_sequence: most samples that are read one after the other before a reader jumps elsewhere;
            None reads to the end of a shard.
        packing_buffer_size: samples of which each reader packs rows at a time, with ``packed_sequence_specs``.
        train_split: name of the part to train on.
        validation_split: name of the part to validate on; None for none.
        test_split: name of the part to test on; None for none.
        num_workers: processes that read ahead for each reader; 0 reads in the training process.
    """

    # records are tokenised as they are read, behind a function of the user's: only ``num_workers`` read ahead
    read_ahead: ClassVar[bool] = False

    path: str
    readers: int | None = None
    shuffle_buffer_size: int = 1000
    max_samples_per_sequence: int | None = 100
    packing_buffer_size: int | None = None
    train_split: str = "train"
    validation_split: str | None = "val"
    test_split: str | None = None

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        found = super().problems()
        for name in ("readers", "shuffle_buffer_size", "max_samples_per_sequence", "packing_buffer_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"dataset.{name}={value}: it must be at least 1")
        if self.dataloader_type != "single":
            found.append(
                f"dataset.dataloader_type={self.dataloader_type!r} has no effect on data that is read forwards: "
                f"leave it out, and choose dataset.shuffle_buffer_size"
            )
        for name in ("validation_split", "test_split"):
            if self.path.endswith(".jsonl") and (value := getattr(self, name)) is not None:
                found.append(  # Energon would take the whole file for each
                    f"dataset.{name}={value!r}: {self.path} has no parts, so the same records would be learnt and "
                    f"evaluated on; set it to null, or name a file for each part in a metadataset"
                )
        if self.packed and self.packing_buffer_size is None:
            found.append(
                "dataset.packing_buffer_size is not set: say of how many samples each reader packs rows, "
                "such as 1000"
            )
        if self.packing_buffer_size is not None and not self.packed:
            found.append(
                f"dataset.packing_buffer_size={self.packing_buffer_size} has no effect without "
                f"dataset.packed_sequence_specs: remove it, or pack"
            )
        return found

    def check_sources(self) -> None:
        """See that Energon and the data are there."""
        if not installed("megatron.energon"):
            raise UserError(
                "dataset=EnergonProvider needs the package megatron-energon, which is not installed: install it "
                "with `uv pip install 'hf-megatron-bridge[energon]'`, or use FinetuningDatasetConfig"
            )
        if "://" in self.path:
            return
        path = Path(self.path)
        if not path.exists():
            raise UserError(f"dataset.path={self.path} does not exist: check the path")
        if path.is_dir() and not (path / META).is_dir():
            raise UserError(
                f"dataset.path={self.path} has no index ({META}): run `energon prepare {self.path}` first"
            )

    def build(self, request: DatasetRequest) -> Splits:
        """Refused: samples that are read forwards have no numbers."""
        raise UserError(
            f"dataset.path={self.path} is read forwards, so there is no list of its samples: draw from the "
            f"iterators of megatron.bridge.data.loaders.build_iterators"
        )

    def iterators(self, request: DatasetRequest, sizes: "BatchSizes", consumed: tuple[int, int]) -> "Iterators":
        """From the first sample on: whoever resumes gives ``train`` its state back."""
        from megatron.bridge.data.energon.adapter import open_reader
        from megatron.bridge.data.loaders import Iterators
        from megatron.bridge.data.streams import StreamedBatches

        self.finalize()
        self.check_sources()
        readers = self.readers or sizes.ranks
        names = (self.train_split, self.validation_split, self.test_split)

        fingerprint = self.fingerprint(readers)

        def batches(split: str, name: str | None, size: int, consumed: int) -> Any:
            if not size or name is None:
                return None
            opener = partial(open_reader, self, name, split == "train", request.tokenizer, readers)
            return StreamedBatches(f"{self.path} ({name})", opener, readers, sizes, fingerprint, consumed)

        return Iterators(*map(batches, SPLITS, names, request.sizes, (consumed[0], 0, 0)))

    def fingerprint(self, readers: int) -> dict[str, Any]:
        """What a position in the data is only good for, by key."""
        keys = ORDER + (PACKING if self.packed else ())
        values = {f"dataset.{key}": getattr(self, key) for key in keys}
        content = _content(Path(self.path)) or self.path  # a folder may be moved
        return values | {"dataset.readers": readers, "content of dataset.path": content}


def _content(path: Path) -> str | None:
    """Changes when the data is divided or indexed anew, or the file of a blend changes; None if it is remote."""
    files = [*sorted((path / META).glob("*.yaml")), path / META / ".info.json"] if path.is_dir() else [path]
    present = [file for file in files if file.is_file()]
    if not present:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for file in present:
        digest.update(file.read_bytes() if file.suffix != ".jsonl" else str(file.stat().st_size).encode())
    return digest.hexdigest()
