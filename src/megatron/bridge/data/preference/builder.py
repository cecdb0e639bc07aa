# SPDX-License-Identifier: Apache-2.0
"""Building the datasets of pairs of a run."""

from typing import TYPE_CHECKING

from megatron.bridge.data.dataset_config import SPLITS, DatasetRequest, Split, Splits
from megatron.bridge.data.finetuning.builder import prepare_split
from megatron.bridge.data.finetuning.rows import EpochRows

if TYPE_CHECKING:
    from megatron.bridge.data.preference.preference_config import PreferenceDatasetConfig


def build_preference_datasets(config: "PreferenceDatasetConfig", request: DatasetRequest) -> Splits:
    """Build datasets of the requested sizes. Only the training data is shuffled."""

    def dataset(split: Split, size: int) -> EpochRows | None:
        prepared = prepare_split(config, split, request.tokenizer) if size else None
        if prepared is None:
            return None
        rows = config.rows(prepared.samples, request.tokenizer.eod)
        seed = config.seed if split == "train" else None
        return EpochRows(rows, size, seed, prepared.report, prepared.name)

    return Splits(*map(dataset, SPLITS, request.sizes))
