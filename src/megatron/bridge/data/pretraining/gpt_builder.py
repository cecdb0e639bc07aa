# SPDX-License-Identifier: Apache-2.0
"""Build Megatron-Core's GPT datasets, and check that none is silently short, empty or endless."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig as CoreGPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from torch.utils.data import Dataset

from megatron.bridge.data.dataset_config import SPLITS, DatasetRequest, Splits
from megatron.bridge.data.pretraining.blend import Blend
from megatron.bridge.data.pretraining.indexed_writer import (
    INDEX_MAGIC,
    check_digests,
    digest,
    finished_state,
)
from megatron.bridge.data.pretraining.shards import ShardedCorpus, finished_manifest, shard_prefix
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron.bridge.utils import storage
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.pretraining.gpt_config import FIMConfig, GPTDatasetConfig


# fields that Megatron-Core's config also has
SAME_FIELDS = (
    *("random_seed", "split", "path_to_cache", "mmap_bin_files", "num_dataset_builder_threads"),
    *("mid_level_dataset_surplus", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
)
MOST_DOCUMENTS = 2**31 - 1  # its indices are int32


class CorpusDataset(GPTDataset):
    """Samples of a corpus whose cached sample indices depend on its content, not on its path alone.

    Megatron-Core would read the indices of an earlier corpus at the same path.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # rank 0 built the indices in memory; it reads them again as memory maps, like the other ranks
        self.document_index, self.sample_index, self.shuffle_index = (
            self._build_document_sample_shuffle_indices()
        )
        if len(
            self.indices
        ):  # as an array, consecutive numbers would take 4 bytes per document on every rank
            self.indices: Any = slice(int(self.indices[0]), int(self.indices[-1]) + 1)

    @property
    def unique_description_hash(self) -> str:
        """Return the cache key of the index files."""
        return self._hash

    @unique_description_hash.setter
    def unique_description_hash(self, of_settings: str) -> None:
        self._hash = f"{of_settings}-{digest(Path(f'{self.dataset_path}.idx'))}"

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: CoreGPTDatasetConfig) -> IndexedDataset:
        if finished_manifest(dataset_path) is None:
            return GPTDataset.build_low_level_dataset(dataset_path, config)
        return ShardedCorpus(dataset_path, mmap=config.mmap_bin_files)


def build_gpt_datasets(config: "GPTDatasetConfig", request: DatasetRequest) -> Splits:
    """Build the training, validation and test datasets. All ranks must call this, and each gets the datasets.

    Rank 0 builds the sample indices first; the others then read them from the cache, synchronized through the
    default process group. Each rank keeps its own dataset (a memory map), so no layout needs to broadcast data.
    """
    core = core_config(config, request)
    _check_corpora(config, core, request)
    sizes: list[int] = list(request.sizes)
    try:
        built = BlendedMegatronDatasetBuilder(CorpusDataset, sizes, lambda: True, core).build()
    except FileNotFoundError as error:
        raise UserError(
            f"dataset.path_to_cache={config.path_to_cache}: the index {error.filename}, which rank 0 wrote, is "
            f"missing on another rank: choose a directory that all nodes share"
        ) from error
    train, valid, test = (
        dataset if size else None for size, dataset in zip(request.sizes, built, strict=True)
    )
    if config.fim is not None and train is not None:
        train = FIMDataset(train, config.fim, request.tokenizer, config.random_seed)
    return Splits(train, valid, test)


def core_config(config: "GPTDatasetConfig", request: DatasetRequest) -> CoreGPTDatasetConfig:
    """Convert ``config`` to Megatron-Core's config, without the splits from which no samples are requested.

    For a split without documents, Megatron-Core would count epochs forever.
    """
    core = CoreGPTDatasetConfig(
        sequence_length=config.seq_length,
        blend=_local_blend(config.blend),
        blend_per_split=_needed_blends(config, request),
        create_attention_mask=config.reset_attention_mask,
        **{name: getattr(config, name) for name in SAME_FIELDS},
        tokenizer=request.tokenizer,  # pyright: ignore[reportArgumentType] - read by name only
    )
    if core.split_matrix is not None:
        parts: list[Any] = list(core.split_matrix)
        needed: Any = [
            part if size else None for part, size in zip(parts, request.sizes, strict=True)
        ]
        core.split_matrix = needed
    return core


def _local_blend(blend: Blend | None) -> Blend | None:
    """Return the local prefixes of a blend; a single corpus has no weights."""
    if blend is None:
        return None
    prefixes = [str(storage.local(prefix)) for prefix in blend[0]]
    return prefixes, None if len(prefixes) == 1 else blend[1]


def _needed_blends(config: "GPTDatasetConfig", request: DatasetRequest) -> list[Any] | None:
    if config.blend_per_split is None:
        return None
    return [
        _local_blend(blend) if size else None
        for blend, size in zip(config.blend_per_split, request.sizes, strict=True)
    ]


def _check_corpora(
    config: "GPTDatasetConfig", core: CoreGPTDatasetConfig, request: DatasetRequest
) -> None:
    parts: list[Any] = core.split_matrix or [(0.0, 1.0)] * len(SPLITS)
    blends = config.blend_per_split or (config.blend,) * len(SPLITS)
    for split, size, part, blend in zip(SPLITS, request.sizes, parts, blends, strict=True):
        if size and blend is None:
            raise UserError(
                f"the run needs {size} samples for {split}, but dataset.blend_per_split has no blend for it: add "
                f"one, or request no {split} samples"
            )
        for prefix in blend[0] if size and blend is not None else ():
            _check_corpus(prefix, split, part or (0.0, 0.0), config)


def _check_corpus(
    prefix: str, split: str, part: tuple[float, float], config: "GPTDatasetConfig"
) -> None:
    corpus = open_corpus(prefix)
    count = len(corpus)
    if count > MOST_DOCUMENTS:
        raise UserError(
            f"dataset.blend: {prefix} has {count:,} documents, more than the {MOST_DOCUMENTS:,} that Megatron-Core "
            f"counts: divide its inputs among several corpora, and blend them"
        )
    first, last = (round(edge * count) for edge in part)  # rounded as in Megatron-Core
    if int(corpus.sequence_lengths[first:last].sum()) < 2:
        raise UserError(
            f"dataset.split={config.split} leaves no text for {split} in {prefix} ({count} documents): give "
            f"{split} a larger share, or its own corpus (dataset.blend_per_split), or request no {split} "
            f"samples"
        )
    _check_cache(Path(config.path_to_cache) if config.path_to_cache else Path(prefix) / "cache")


def open_corpus(prefix: str) -> IndexedDataset:
    local_prefix = storage.local(prefix)
    prefix = str(local_prefix)
    storage.pull(local_prefix.parent, lambda name: name.startswith(f"{local_prefix.name}."))
    if (manifest := finished_manifest(prefix)) is not None:
        check_digests(prefix, manifest["digests"])
        for shard_index, shard in enumerate(manifest["shards"]):
            check_digests(str(shard_prefix(prefix, shard_index)), shard["digests"])
        return ShardedCorpus(prefix)
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise UserError(_missing_corpus(prefix, suffix))
    if Path(prefix + ".bin").stat().st_size == 0:
        raise UserError(
            f"the corpus {prefix}.bin is empty: run `megatron-bridge data preprocess` again"
        )
    try:
        with Path(prefix + ".idx").open("rb") as file:
            assert file.read(len(INDEX_MAGIC)) == INDEX_MAGIC, "it is not an index"
        corpus = IndexedDataset(prefix)
    except (AssertionError, ValueError, OSError) as error:
        raise UserError(
            f"the corpus index {prefix}.idx is damaged ({error}): write it again"
        ) from error
    expected = int(corpus.sequence_lengths.sum(dtype="int64")) * DType.size(corpus.index.dtype)
    actual = Path(prefix + ".bin").stat().st_size
    if actual != expected:
        raise UserError(
            f"the corpus {prefix}.bin has {actual} bytes, its index says {expected}: write it again"
        )
    written = finished_state(Path(prefix))
    check_digests(prefix, {} if written is None else written.digests)
    return corpus


def _missing_corpus(prefix: str, suffix: str) -> str:
    if prefix.endswith(suffix):
        return f"the corpus file {prefix}{suffix} does not exist: give the path without the ending {suffix}"
    if Path(prefix).is_file():
        return f"{prefix} is not a corpus: make one from its text with `megatron-bridge data preprocess`"
    return f"the corpus file {prefix}{suffix} does not exist: check the path in dataset.blend"


def _check_cache(directory: Path) -> None:
    """Refuse an empty cache that cannot be written: rank 0 would fail later, while the other ranks wait."""
    if directory.is_dir() and any(directory.iterdir()):
        return
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(
            f"the sample indices cannot be written to {directory}: set dataset.path_to_cache to a writable "
            f"directory that all nodes share"
        )


class FIMDataset(Dataset[dict[str, Any]]):
    """Fill in the middle: split some documents of another dataset into three pieces, and reorder the pieces.

    From such documents a model learns to complete code at a cursor (Bavarian et al. 2022, "Efficient Training of
    Language Models to Fill in the Middle"). The splits are between characters, not tokens, because a cursor may be
    anywhere.

    A sample depends only on its index and the seed, and keeps its length. The three added tokens displace tokens at
    the end. If the pieces have fewer tokens than before, the sample ends in end-of-document tokens that are left out
    of the loss.
    """

    def __init__(self, dataset: Any, config: "FIMConfig", tokenizer: Tokenizer, seed: int) -> None:
        self.dataset = dataset
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        names = (config.prefix_token, config.suffix_token, config.middle_token)
        self._prefix, self._suffix, self._middle = (
            _special_token(tokenizer, name) for name in names
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.dataset[index]
        ids = torch.cat((sample["tokens"], sample["labels"][-1:])).numpy()
        random = np.random.default_rng((self._seed, index))
        new = self._rearrange(ids, random)[: len(ids)]
        text = torch.full((len(ids),), self._tokenizer.eod)
        text[: len(new)] = torch.from_numpy(new)
        loss_mask = sample["loss_mask"].clone()
        loss_mask[len(new) - 1 :] = 0.0
        return sample | {"tokens": text[:-1], "labels": text[1:], "loss_mask": loss_mask}

    def _rearrange(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Rearrange each document of the sample separately; end-of-document tokens keep their positions."""
        ends = np.flatnonzero(ids == self._tokenizer.eod)
        parts = []
        start = 0
        for end in [*ends.tolist(), len(ids)]:
            parts.append(self._rearrange_document(ids[start:end], random))
            parts.append(ids[end : end + 1])
            start = end + 1
        return np.concatenate(parts)

    def _rearrange_document(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if not len(ids) or random.random() >= self._config.rate:
            return ids
        text = self._tokenizer.detokenize(ids.tolist())
        if "\ufffd" in text:  # the sample splits a character, whose bytes would be lost
            return ids
        first, second = sorted(random.integers(0, len(text) + 1, 2).tolist())
        prefix = self._tokenizer.plain_tokens(text[:first])  # the beginning of a text
        middle, suffix = map(self._tokenizer.continue_tokens, (text[first:second], text[second:]))
        if random.random() < self._config.spm_rate:
            new = [self._prefix, self._suffix, *suffix, self._middle, *prefix, *middle]
        else:
            new = [self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle]
        return np.array(new, dtype=ids.dtype)


def _special_token(tokenizer: Tokenizer, name: str) -> int:
    ids = tokenizer.continue_tokens(name) if isinstance(tokenizer, HuggingFaceTokenizer) else []
    if len(ids) != 1:
        raise UserError(
            f"dataset.fim: {name} is not a single token of the tokenizer: name the tokenizer's own "
            f"fill-in-the-middle tokens, or use a tokenizer that has some"
        )
    return ids[0]
