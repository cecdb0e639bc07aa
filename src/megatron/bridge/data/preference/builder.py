# SPDX-License-Identifier: Apache-2.0
"""Building the datasets of pairs of a run."""

from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.data.dataset_config import SPLITS, DatasetRequest, Split, Splits
from megatron.bridge.data.finetuning.rows import EpochRows
from megatron.bridge.data.preference.pairs import PairEncoder, PairRows
from megatron.bridge.data.records.preparation import PreparedSamples, prepare
from megatron.bridge.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.bridge.data.preference.preference_config import PreferenceDatasetConfig


def build_preference_datasets(config: "PreferenceDatasetConfig", request: DatasetRequest) -> Splits:
    """Build datasets of the requested sizes. Only the training data is shuffled.

    Raises:
        UserError: a source is missing or has a wrong record, or no pair is left.
    """

    def dataset(split: Split, size: int) -> EpochRows | None:
        prepared = prepare_pairs(config, split, request.tokenizer) if size else None
        if prepared is None:
            return None
        rows = PairRows(prepared.samples, request.tokenizer.eod, config.sequence_multiple)
        return EpochRows(rows, size, config.seed if split == "train" else None, prepared.report)

    return Splits(*map(dataset, SPLITS, request.sizes))


def prepare_pairs(config: "PreferenceDatasetConfig", split: Split, tokenizer: Tokenizer) -> PreparedSamples | None:
    """Tokenize a split; None if it is not used."""
    source = config.limited_source(split)
    if source is None:
        return None
    encoder = PairEncoder(tokenizer, config.pair_rules())
    folder = Path(config.prepared_dir) if config.prepared_dir else None
    return prepare(source, tokenizer, encoder.rules, folder, config.workers, encoder)
