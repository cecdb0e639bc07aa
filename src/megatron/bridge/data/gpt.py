# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's GPT datasets, built so that nothing is quietly short, empty or endless."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig as CoreGPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

from megatron.bridge.data.config import SPLITS, Blend, DatasetRequest, Splits
from megatron.bridge.data.fim import FIMDataset
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.config import GPTDatasetConfig

INDEX_HEADER = b"MMIDIDX\x00\x00"


def build_gpt_datasets(config: "GPTDatasetConfig", request: DatasetRequest) -> Splits:
    """Train, validation and test datasets; every rank calls this and gets them.

    Rank 0 builds the sample indices first and the others read them from the cache, over the default process
    group. Every rank keeps a dataset of its own (it is a memory map), so that no layout needs to pass data on.

    Raises:
        UserError: a corpus is missing, damaged or too small, or the cache cannot be written.
    """
    core = core_config(config, request)
    _check_corpora(config, core, request)
    sizes: list[int] = list(request.sizes)
    try:
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, _everywhere, core).build()
    except FileNotFoundError as error:
        raise UserError(
            f"dataset.path_to_cache={config.path_to_cache}: the index {error.filename} that rank 0 wrote is not "
            f"there: choose a directory that all machines share"
        ) from error
    train, valid, test = (dataset if size else None for size, dataset in zip(request.sizes, built, strict=True))
    if config.fim is not None and train is not None:
        train = FIMDataset(train, config.fim, request.tokenizer, config.random_seed)
    return Splits(train, valid, test)


def _everywhere() -> bool:
    return True


def core_config(config: "GPTDatasetConfig", request: DatasetRequest) -> CoreGPTDatasetConfig:
    """``config`` in Megatron-Core's form, without the splits of which nothing is needed.

    A split of no document would make Megatron-Core count epochs for ever, hence it is taken out.
    """
    core = CoreGPTDatasetConfig(
        random_seed=config.random_seed,
        sequence_length=config.seq_length,
        blend=_unweighted_single(config.blend),
        blend_per_split=_needed_blends(config, request),
        split=config.split,
        path_to_cache=config.path_to_cache,
        mmap_bin_files=config.mmap_bin_files,
        num_dataset_builder_threads=config.num_dataset_builder_threads,
        mid_level_dataset_surplus=config.mid_level_dataset_surplus,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
        create_attention_mask=config.reset_attention_mask,
        tokenizer=request.tokenizer,  # pyright: ignore[reportArgumentType] - read by name only
    )
    if core.split_matrix is not None:
        parts: list[Any] = list(core.split_matrix)
        needed: Any = [part if size else None for part, size in zip(parts, request.sizes, strict=True)]
        core.split_matrix = needed
    return core


def _unweighted_single(blend: Blend | None) -> Blend | None:
    """One corpus needs no blending."""
    return (blend[0], None) if blend is not None and len(blend[0]) == 1 else blend


def _needed_blends(config: "GPTDatasetConfig", request: DatasetRequest) -> list[Any] | None:
    if config.blend_per_split is None:
        return None
    return [
        _unweighted_single(blend) if size else None
        for blend, size in zip(config.blend_per_split, request.sizes, strict=True)
    ]


def _check_corpora(config: "GPTDatasetConfig", core: CoreGPTDatasetConfig, request: DatasetRequest) -> None:
    parts: list[Any] = core.split_matrix or [(0.0, 1.0)] * len(SPLITS)
    for number, (name, size, part) in enumerate(zip(SPLITS, request.sizes, parts, strict=True)):
        blend = config.blend if config.blend_per_split is None else config.blend_per_split[number]
        if size and blend is None:
            raise UserError(
                f"the run needs {size} samples for {name}, but dataset.blend_per_split names none for it"
            )
        for prefix in blend[0] if size and blend is not None else ():
            _check_corpus(prefix, name, part or (0.0, 0.0), config)


def _check_corpus(prefix: str, split: str, part: tuple[float, float], config: "GPTDatasetConfig") -> None:
    corpus = open_corpus(prefix)
    count = len(corpus)
    first, last = (round(edge * count) for edge in part)  # rounded as Megatron-Core does
    if int(corpus.sequence_lengths[first:last].sum()) < 2:
        raise UserError(
            f"dataset.split={config.split} leaves no text for {split} in {prefix} ({count} documents): give "
            f"{split} a larger share, a corpus of its own (dataset.blend_per_split), or ask for no {split} samples"
        )
    _check_cache(Path(config.path_to_cache) if config.path_to_cache else Path(prefix) / "cache")


def open_corpus(prefix: str) -> IndexedDataset:
    """The indexed dataset at ``prefix``.

    Raises:
        UserError: one of its two files is missing, damaged or shorter than its index says.
    """
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            hint = f" (leave out the ending {suffix})" if prefix.endswith(suffix) else ""
            if Path(prefix).is_file() and not hint:
                raise UserError(
                    f"{prefix} is not a corpus: make one of its text with `megatron-bridge data preprocess`"
                )
            raise UserError(
                f"the corpus file {prefix}{suffix} does not exist: check the path in dataset.blend{hint}"
            )
    if Path(prefix + ".bin").stat().st_size == 0:
        raise UserError(f"the corpus {prefix}.bin is empty: run `megatron-bridge data preprocess` again")
    try:
        with Path(prefix + ".idx").open("rb") as file:
            assert file.read(len(INDEX_HEADER)) == INDEX_HEADER, "it is no index"
        corpus = IndexedDataset(prefix)
    except (AssertionError, ValueError, OSError) as error:
        raise UserError(f"the corpus index {prefix}.idx is damaged ({error}): write it again") from error
    item = DType.size(corpus.index.dtype)
    expected = int(corpus.sequence_lengths.sum(dtype="int64")) * item
    actual = Path(prefix + ".bin").stat().st_size
    if actual != expected:
        raise UserError(f"the corpus {prefix}.bin has {actual} bytes, its index says {expected}: write it again")
    return corpus


def _check_cache(directory: Path) -> None:
    """Refuse a cache that cannot be written now, before rank 0 fails while the others wait for it.

    One that cannot be written but holds something may hold all that is needed.
    """
    if directory.is_dir() and any(directory.iterdir()):
        return
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(
            f"the sample indices cannot be written to {directory}: set dataset.path_to_cache to a directory that "
            f"can be written and that all machines share"
        )
