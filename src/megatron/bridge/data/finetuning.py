# SPDX-License-Identifier: Apache-2.0
"""Data sets for fine-tuning: from a config to rows for the three purposes of a run."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.data import Dataset

from megatron.bridge.data.config import SPLITS, DatasetConfig, DatasetRequest, Split, Splits, choices
from megatron.bridge.data.encoding import EncodingRules
from megatron.bridge.data.prepare import Preparation, Prepared, prepare
from megatron.bridge.data.rows import BlendedRows, Epochs, OpenRows, PackedRows, PaddedRows, Row
from megatron.bridge.data.sources import SUFFIXES, FirstRecords, Source
from megatron.bridge.data.tokenizer import Tokenizer
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.config import BlendedDatasetConfig, RecordDatasetConfig, SFTDatasetConfig

STEMS: dict[Split, str] = {"train": "training", "valid": "validation", "test": "test"}
TRUNCATIONS = ("refuse", "drop", "right", "left", "keep_answer")
TRAIN_ON = ("assistant", "last", "completion", "everything")


def build_finetuning_datasets(config: "SFTDatasetConfig", request: DatasetRequest) -> Splits:
    """Datasets of the requested sizes; only the training data is shuffled.

    Raises:
        UserError: a source is missing or has a wrong record, or no example is left.
    """
    datasets: list[Dataset[Row] | None] = []
    for split, size in zip(SPLITS, request.sizes, strict=True):
        prepared = prepare_split(config, split, request.tokenizer) if size else None
        if prepared is None:
            datasets.append(None)
            continue
        seed = config.seed if split == "train" else None
        datasets.append(Epochs(rows_of(config, prepared, request.tokenizer), size, seed, prepared.report))
    return Splits(*datasets)


def build_blended_datasets(config: "BlendedDatasetConfig", request: DatasetRequest) -> Splits:
    """Each split of all parts that have it, by their weights."""
    parts = [part.build(request) for part in config.datasets]
    blended: list[Dataset[Row] | None] = []
    for number, size in enumerate(request.sizes):
        found = [
            (part[number], weight)
            for part, weight in zip(parts, config.weights, strict=True)
            if part[number] is not None
        ]
        datasets = [dataset for dataset, _ in found if dataset is not None]
        blended.append(BlendedRows(datasets, [weight for _, weight in found], size) if found else None)
    return Splits(*blended)


def prepare_split(config: "SFTDatasetConfig", split: Split, tokenizer: Tokenizer) -> Prepared | None:
    """The samples of a split; None if it is not wanted."""
    source = limited_source(config, split)
    if source is None:
        return None
    folder = Path(config.prepared_dir) if config.prepared_dir else None
    return prepare(source, tokenizer, encoding_rules(config), Preparation(folder, config.workers))


def limited_source(config: "SFTDatasetConfig", split: Split) -> Source | None:
    """The records of a split that are wanted; None if it is not wanted."""
    if {"train": True, "valid": config.do_validation, "test": config.do_test}[split]:
        source = config.source(split)
        limits = {
            "train": config.max_train_samples,
            "valid": config.max_validation_samples,
            "test": config.max_test_samples,
        }
        limit = limits[split]
        return source if source is None or limit is None else FirstRecords(source, limit)
    return None


def encoding_rules(config: "RecordDatasetConfig") -> EncodingRules:
    """How records become samples."""
    return EncodingRules(
        max_tokens=longest_sample(config) + 1,
        truncation=config.truncation,
        train_on=config.train_on,
        split_turns=config.split_turns,
        chat_template=template_text(config.chat_template),
        chat_template_options=config.chat_template_options,
        process_example_fn=config.process_example_fn,
    )


def longest_sample(config: "RecordDatasetConfig") -> int:
    """Most inputs of a sample: its length in a row is rounded up."""
    return config.seq_length // config.sequence_multiple * config.sequence_multiple


def rows_of(config: "SFTDatasetConfig", prepared: Prepared, tokenizer: Tokenizer) -> Dataset[Row]:
    """The samples as rows, in the way that the config asks for."""
    examples, multiple, padding = prepared.examples, config.sequence_multiple, tokenizer.eod
    if config.padding_free:
        return OpenRows(examples, padding, multiple)
    if not config.packed:
        return PaddedRows(examples, config.seq_length, padding)
    rows = PackedRows(examples, config.seq_length, padding, multiple)
    console().print(f"{len(examples):,} samples packed into {len(rows):,} rows, {rows.fill:.2%} full")
    return rows


def template_text(template: str | None) -> str | None:
    """The template that a config names or holds.

    Raises:
        UserError: it is neither a file nor a template.
    """
    if template is None or "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"dataset.chat_template={template} cannot be read: {reason}") from error


def split_file(folder: Path, split: Split) -> Path:
    """The file of a split in a folder.

    Raises:
        UserError: there is none, or two with different endings.
    """
    found = [path for suffix in SUFFIXES if (path := folder / f"{STEMS[split]}{suffix}").is_file()]
    if len(found) > 1:
        raise UserError(f"{' and '.join(map(str, found))} are both there: remove or rename one of them")
    if not found:
        names = sorted(path.name for path in folder.iterdir())[:5] if folder.is_dir() else []
        raise UserError(
            f"{folder} has no file {STEMS[split]} with one of the endings {', '.join(SUFFIXES)} (there is "
            f"{', '.join(names) or 'nothing'}){_unneeded(split)}"
        )
    return found[0]


def _unneeded(split: Split) -> str:
    switches = {"valid": "dataset.do_validation=false", "test": "dataset.do_test=false"}
    return f": add it, or set {switches[split]}" if split in switches else ": add it"


def record_problems(config: "RecordDatasetConfig") -> Iterator[str]:
    """What is wrong with the values that make samples of records, one sentence each."""
    if config.truncation not in TRUNCATIONS:
        yield f"dataset.truncation={config.truncation!r} is not known: choose {choices(TRUNCATIONS)}"
    if config.train_on not in TRAIN_ON:
        yield f"dataset.train_on={config.train_on!r} is not known: choose {choices(TRAIN_ON)}"
    if config.split_turns and config.train_on != "assistant":
        yield (
            f"dataset.split_turns=True learns one answer of each sample, so train_on={config.train_on} has no "
            f"effect: leave one of them out"
        )
    yield from _packing_problems(config)


def sft_problems(config: "SFTDatasetConfig") -> Iterator[str]:
    """What is wrong with the values beyond those, one sentence each."""
    counts = ("workers", "max_train_samples", "max_validation_samples", "max_test_samples")
    for name in counts:
        value = getattr(config, name)
        if value is not None and value < 1:
            yield f"dataset.{name}={value}: it must be at least 1"


def _packing_problems(config: "RecordDatasetConfig") -> Iterator[str]:
    specs = config.packed_sequence_specs
    if specs is None:
        return
    size, multiple = specs.packed_sequence_size, config.sequence_multiple
    if config.packed and config.padding_free:
        yield "dataset.padding_free=True joins samples instead of packing them: leave one of the two out"
    if config.packed and size != config.seq_length:
        yield (
            f"dataset.packed_sequence_specs.packed_sequence_size={size} is not dataset.seq_length="
            f"{config.seq_length}: a packed row is as long as the model's rows, so set both to one value"
        )
    if not config.packed and size != -1:
        yield f"dataset.packed_sequence_specs.packed_sequence_size={size}: give dataset.seq_length, or -1 for none"
    if multiple < 1 or config.seq_length % multiple:
        yield (
            f"dataset.packed_sequence_specs.pad_seq_to_mult={multiple} does not divide dataset.seq_length="
            f"{config.seq_length}: choose another"
        )


def blend_problems(config: "BlendedDatasetConfig") -> Iterator[str]:
    """What is wrong with the values, one sentence each."""
    if not config.datasets:
        yield "dataset.datasets is empty: name at least one data set"
    if len(config.weights) != len(config.datasets):
        yield (
            f"dataset.weights has {len(config.weights)} entries for {len(config.datasets)} data sets: give one "
            f"for each"
        )
    if any(not weight > 0 for weight in config.weights):
        yield f"dataset.weights={config.weights}: all must be positive"
    for name in ("seq_length", "packed", "padding_free", "sequence_multiple"):
        values = {getattr(dataset, name) for dataset in config.datasets}
        expected = {config.seq_length} if name == "seq_length" else values
        if len(values | expected) > 1:
            yield f"dataset.datasets differ in {name}: rows must be alike, so set it the same in all"
    for number, dataset in enumerate(config.datasets):
        for entry in fields(DatasetConfig):
            if entry.name != "seq_length" and (value := getattr(dataset, entry.name)) != entry.default:
                yield f"dataset.datasets[{number}].{entry.name}={value} has no effect: set it on the blend"
        yield from (f"dataset.datasets[{number}]: {problem}" for problem in dataset.problems())
