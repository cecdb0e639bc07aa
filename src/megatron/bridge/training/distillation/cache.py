# SPDX-License-Identifier: Apache-2.0
"""A cache of the teacher's top tokens on disk, indexed by training sample.

The entry of each sample contains a hash of its tokens, so that it is used only for the text that the teacher saw.
The cache can be read without the teacher and with any parallel sizes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.lib.format import open_memmap
from torch import Tensor

from megatron.bridge.data.loaders import Batch, DataIterator
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.batch_size import samples_of
from megatron.bridge.training.distillation.divergence import TopTokens
from megatron.bridge.training.distillation.teacher import identity
from megatron.bridge.training.evaluation import iterators_per_chunk
from megatron.bridge.training.state import Run
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.errors import UserError

HEADER_FILE = "cache.json"
TARGET_KEYS = ("teacher_ids", "teacher_log_probs", "teacher_log_rest")
NO_HASH = 0  # marks an empty entry; no text has this hash


@dataclass(frozen=True)
class CacheHeader:
    """The settings with which a cache was made."""

    teacher: str
    identity: str  # hash that identifies the teacher
    temperature: float
    top_k: int
    seq_length: int
    vocab_size: int
    samples: int


@dataclass
class TeacherCache:
    """A cache of top tokens in a folder."""

    folder: Path
    header: CacheHeader
    arrays: dict[str, np.memmap] = field(default_factory=dict[str, np.memmap])
    """Token ids, log probabilities, log probabilities of all other tokens, and hashes of the samples' tokens."""

    def open(self, mode: Any) -> "TeacherCache":
        """Memory-map the files with mode ``r`` or ``r+``."""
        self.arrays = {
            name: open_memmap(self.folder / f"{name}.npy", mode)
            for name in _array_shapes(self.header)
        }
        return self

    def create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, (shape, dtype) in _array_shapes(self.header).items():
            open_memmap(self.folder / f"{name}.npy", "w+", dtype, shape).flush()
        write_text(self.folder / HEADER_FILE, json.dumps(asdict(self.header), indent=1) + "\n")

    def has(self, ids: Sequence[int]) -> bool:
        return bool((self.arrays["hash"][list(ids)] != NO_HASH).all())

    @property
    def done(self) -> int:
        return int(np.count_nonzero(self.arrays["hash"]))

    def write(self, ids: Sequence[int], tokens: Tensor, top: TopTokens) -> None:
        """Store the top tokens of samples. The hash is written last, so that no entry is incomplete."""
        indices = list(ids)
        rows = (len(indices), self.header.seq_length)
        for key, values in zip(TARGET_KEYS, top, strict=True):
            self.arrays[key][indices] = (
                values.reshape(*rows, *values.shape[2:]).float().cpu().numpy()
            )
            self.arrays[key].flush()
        self.arrays["hash"][indices] = _token_hashes(tokens.reshape(rows))
        self.arrays["hash"].flush()

    def read(self, ids: Sequence[int], tokens: Tensor) -> Batch:
        """The top tokens of samples, in the shape of ``tokens``."""
        indices = list(ids)
        hashes = self.arrays["hash"]
        cached_hashes = [
            int(hashes[index]) if index < len(hashes) else NO_HASH for index in indices
        ]
        now = _token_hashes(tokens.reshape(len(indices), -1))
        for index, before, after in zip(indices, cached_hashes, now.tolist(), strict=True):
            if before != after:
                difference = (
                    "is not in the cache"
                    if before == NO_HASH
                    else "differs from the one that the teacher saw"
                )
                raise UserError(
                    f"distill.cache={self.folder}: training sample {index} {difference}; the data, its order or the "
                    "tokenizer has changed, so rebuild the cache with --mode cache-teacher"
                )
        targets = {key: torch.from_numpy(self.arrays[key][indices]) for key in TARGET_KEYS}
        return {
            key: values.reshape(*tokens.shape, *values.shape[2:]) for key, values in targets.items()
        }


def header_of(config: ConfigContainer, samples: int) -> CacheHeader:
    distill: Any = config.distill  # a rule has required the teacher and top_k
    vocabulary: Any = config.model.vocab_size
    return CacheHeader(
        teacher=distill.teacher,
        identity=identity(distill.teacher),
        temperature=distill.temperature,
        top_k=distill.top_k,
        seq_length=config.dataset.seq_length,
        vocab_size=vocabulary,
        samples=samples,
    )


def read_header(folder: Path) -> CacheHeader:
    try:
        return CacheHeader(**strict_json.loads((folder / HEADER_FILE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"distill.cache={folder} is not a cache of a teacher: create it with --mode cache-teacher, or unset it"
        ) from error


def check_header(folder: Path, header: CacheHeader, config: ConfigContainer) -> None:
    distill = config.distill
    assert distill is not None, "distill is not set"
    settings = {
        "distill.temperature": (distill.temperature, header.temperature),
        "distill.top_k": (distill.top_k, header.top_k),
        "dataset.seq_length": (config.dataset.seq_length, header.seq_length),
        "model.vocab_size": (config.model.vocab_size, header.vocab_size),
    }
    differing = [
        f"{key} was {then}, not {now}" for key, (now, then) in settings.items() if now != then
    ]
    if distill.teacher is not None and identity(distill.teacher) != header.identity:
        differing.append(
            f"the teacher was {header.teacher}, whose weights differ from those of {distill.teacher}"
        )
    if differing:
        raise UserError(
            f"distill.cache={folder} was made for another run: {'; '.join(differing)}; use the same settings, or "
            "create another cache with --mode cache-teacher"
        )


def open_cache(config: ConfigContainer) -> TeacherCache:
    assert config.distill is not None, "distill is not set"
    folder = Path(config.distill.cache or "")
    header = read_header(folder)
    check_header(folder, header, config)
    cache = TeacherCache(folder, header).open("r")
    if cache.done < header.samples:
        raise UserError(
            f"distill.cache={folder} has {cache.done} of {header.samples} samples: run --mode cache-teacher "
            "again, which resumes where it stopped"
        )
    drawn = samples_of(config.train)
    if config.dataset.dataloader_type != "cyclic" and drawn > header.samples:
        raise UserError(
            f"distill.cache={folder} has {header.samples} samples, this run uses {drawn}: train fewer steps, or "
            "create a larger cache with --mode cache-teacher"
        )
    return cache


class CachedTargets(Callback):
    """Adds the teacher's top tokens to each training batch."""

    def __init__(self, cache: TeacherCache) -> None:
        self._cache = cache

    def on_train_start(self, context: Run) -> None:
        batches = context.data.train
        assert batches is not None, "a run without data"
        context.train_batches = iterators_per_chunk(
            BatchesWithTargets(batches, self._cache), len(context.model)
        )


class BatchesWithTargets:
    """Microbatches with the teacher's top tokens."""

    def __init__(self, batches: DataIterator, cache: TeacherCache) -> None:
        self.sample_ids: list[int] = []
        self._batches = batches
        self._cache = cache

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.sample_ids = self._batches.sample_ids
        return batch | self._cache.read(self.sample_ids, batch["tokens"])

    def replicate(self) -> "BatchesWithTargets":
        """A new iterator over the same batches, from the first one."""
        return BatchesWithTargets(self._batches.replicate(), self._cache)


def cached_targets(batch: Batch) -> TopTokens | None:
    """The top tokens that ``BatchesWithTargets`` added; None in a batch without them."""
    return TopTokens(*(batch[key] for key in TARGET_KEYS)) if TARGET_KEYS[0] in batch else None


def _array_shapes(header: CacheHeader) -> dict[str, tuple[tuple[int, ...], Any]]:
    rows = (header.samples, header.seq_length)
    kinds = (np.int32, np.float32, np.float32)
    shapes = ((*rows, header.top_k), (*rows, header.top_k), rows)
    named = dict(zip(TARGET_KEYS, zip(shapes, kinds, strict=True), strict=True))
    return {**named, "hash": ((header.samples,), np.uint64)}


def _token_hashes(rows: Tensor) -> np.ndarray:
    texts = rows.cpu().numpy().astype(np.int64)
    return np.array(
        [xxhash.xxh3_64_intdigest(text.tobytes()) or 1 for text in texts], dtype=np.uint64
    )
