# SPDX-License-Identifier: Apache-2.0
"""The config of blends of fine-tuning datasets."""

from dataclasses import dataclass, fields
from typing import ClassVar

from megatron.bridge.data.dataset_config import DatasetConfig, DatasetRequest, Splits
from megatron.bridge.data.finetuning.sft_config import SFTDatasetConfig


@dataclass(kw_only=True)
class BlendedDatasetConfig(DatasetConfig):
    """Several datasets for fine-tuning at once."""

    read_ahead: ClassVar[bool] = True

    datasets: list[SFTDatasetConfig]
    """The parts. All must have the ``seq_length`` of the blend and the same kind of rows."""
    weights: list[float]
    """Share of the rows that comes from each part. Without packing a row is a sample; a packed row is full of
    tokens, whatever the number of its samples."""

    @property
    def masks_tokens(self) -> bool:
        return True

    @property
    def shuffle_seed(self) -> int:
        return self.datasets[0].shuffle_seed if self.datasets else 0

    @property
    def packed(self) -> bool:
        return any(dataset.packed for dataset in self.datasets)

    @property
    def joins_samples(self) -> bool:
        return any(dataset.joins_samples for dataset in self.datasets)

    def problems(self) -> list[str]:
        found, count = super().problems(), len(self.datasets)
        if not self.datasets:
            found.append("dataset.datasets is empty: name at least one dataset")
        if len(self.weights) != count:
            found.append(f"dataset.weights has {len(self.weights)} entries for {count} datasets: give one for each")
        if any(not weight > 0 for weight in self.weights):
            found.append(f"dataset.weights={self.weights}: all must be positive")
        for name in ("seq_length", "packed", "padding_free", "sequence_multiple"):
            values = {getattr(dataset, name) for dataset in self.datasets}
            expected = {self.seq_length} if name == "seq_length" else values
            if len(values | expected) > 1:
                found.append(f"dataset.datasets differ in {name}: set it to the same value in all of them")
        return found + [problem for number in range(count) for problem in self._part_problems(number)]

    def _part_problems(self, number: int) -> list[str]:
        part, name = self.datasets[number], f"dataset.datasets[{number}]"
        found = [
            f"{name}.{entry.name}={value} has no effect: set it on the blend"
            for entry in fields(DatasetConfig)
            if entry.name != "seq_length" and (value := getattr(part, entry.name)) != entry.default
        ]
        return found + [f"{name}: {problem}" for problem in part.problems()]

    def check_sources(self) -> None:
        for dataset in self.datasets:
            dataset.check_sources()

    def build(self, request: DatasetRequest) -> Splits:
        from megatron.bridge.data.finetuning.builder import build_blended_datasets  # imports torch

        self.finalize()
        return build_blended_datasets(self, request)
