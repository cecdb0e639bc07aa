# SPDX-License-Identifier: Apache-2.0
"""Building the datasets of rows of a fine-tuning run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.data import Dataset

from megatron.bridge.data.dataset_config import SPLITS, DatasetRequest, Split, Splits
from megatron.bridge.data.finetuning.rows import (
    BlendedRows,
    EpochRows,
    PackedRows,
    PaddedRows,
    Row,
    SampleRows,
)
from megatron.bridge.data.media.processor import MediaProcessor
from megatron.bridge.data.records.encoding import media_processor
from megatron.bridge.data.records.preparation import PreparedSamples, prepare
from megatron.bridge.data.records.problems import find_problems, join_problems
from megatron.bridge.data.records.samples import Samples
from megatron.bridge.data.tokenizer import Tokenizer
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.finetuning.sft_config import BlendedDatasetConfig, SFTDatasetConfig


def build_finetuning_datasets(config: "SFTDatasetConfig", request: DatasetRequest) -> Splits:
    media = media_processor(request.tokenizer, config.encoding_rules())
    if media is not None:
        media.share = request.image_share
    return build_datasets(
        config, request, lambda samples: _make_rows(config, samples, request.tokenizer, media)
    )


def build_datasets(
    config: "SFTDatasetConfig", request: DatasetRequest, rows: Callable[[Samples], Dataset[Row]]
) -> Splits:
    """Build datasets of the requested sizes. Only the training data is shuffled."""

    def dataset(split: Split, size: int) -> EpochRows | None:
        prepared = prepare_split(config, split, request.tokenizer) if size else None
        if prepared is None:
            if size and config.uses_split(split):
                print_rank_0(f"note: the data has no {split} split: nothing is evaluated there")
            return None
        seed = config.seed if split == "train" else None
        return EpochRows(rows(prepared.samples), size, seed, prepared.report, prepared.name)

    return Splits(*map(dataset, SPLITS, request.sizes))


def build_blended_datasets(config: "BlendedDatasetConfig", request: DatasetRequest) -> Splits:
    """Blend each split of all parts that have it, by their weights."""
    parts = [part.build(request) for part in config.datasets]
    blended: list[Dataset[Row] | None] = []
    for split_index, size in enumerate(request.sizes):
        datasets = {
            index: dataset
            for index, part in enumerate(parts)
            if (dataset := part[split_index]) is not None
        }
        weights = [config.weights[index] for index in datasets]
        blended.append(BlendedRows(list(datasets.values()), weights, size) if datasets else None)
    return Splits(*blended)


def prepare_split(
    config: "SFTDatasetConfig", split: Split, tokenizer: Tokenizer
) -> PreparedSamples | None:
    """Tokenize a split, unless that was done to count its rows; None if it is not used."""
    if split == "train" and config.counted is not None:
        counted = config.counted
        config.counted = None
        return counted
    source = config.limited_source(split)
    if source is None:
        return None
    folder = Path(config.prepared_dir) if config.prepared_dir else None
    try:
        return prepare(source, config.encoder(tokenizer), folder, config.workers)
    except UserError as error:
        raise add_other_problems(error, config, tokenizer) from error


def add_other_problems(
    first: UserError, config: "SFTDatasetConfig", tokenizer: Tokenizer
) -> UserError:
    """Return an error with all mistakes in the records of all splits, of which ``first`` is one."""
    sentences = [str(first), *find_record_problems(config, tokenizer)]
    return UserError(join_problems(list(dict.fromkeys(sentences))))


def find_record_problems(config: "SFTDatasetConfig", tokenizer: Tokenizer) -> list[str]:
    """Return a sentence for each mistake in the records of all splits."""
    encoder = config.encoder(tokenizer)
    sentences: list[str] = []
    for split in SPLITS:
        try:
            source = config.limited_source(split)
            sentences += [] if source is None else find_problems(source, encoder)
        except UserError as error:  # a file that is missing or no table
            sentences.append(str(error))
    return sentences


def _make_rows(
    config: "SFTDatasetConfig", samples: Samples, tokenizer: Tokenizer, media: MediaProcessor | None
) -> Dataset[Row]:
    multiple = config.sequence_multiple
    padding = tokenizer.eod
    if config.padding_free:
        return SampleRows(samples, None, padding, multiple, media)
    if not config.packed:
        return PaddedRows(samples, config.seq_length, padding, media=media)
    return PackedRows(samples, config.seq_length, padding, multiple, media)
