# SPDX-License-Identifier: Apache-2.0
"""A teacher's likeliest tokens on disk, by the number of the sample.

Each sample's entry holds a hash of its tokens: an entry is used for the text that the teacher saw, or not at all.
Reading needs no teacher, and any layout can read what any other wrote.
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

from megatron.bridge.data.loaders import Batch, Batches
from megatron.bridge.training.batch_size import samples_of
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.distillation.divergence import TopTokens
from megatron.bridge.training.distillation.teacher import identity
from megatron.bridge.training.evaluation import per_chunk
from megatron.bridge.training.state import Run
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.errors import UserError

HEADER = "cache.json"
KEYS = ("teacher_ids", "teacher_log_probs", "teacher_log_rest")
MISSING = 0  # no text has this hash


@dataclass(frozen=True)
class Header:
    """What a cache was made of, and for.

    Attributes:
        teacher: What the teacher was called.
        identity: What tells it from others.
        temperature: Of the logits.
        top_k: Tokens that are known one by one.
        seq_length: Tokens of a sample.
        vocab_size: Of the teacher.
        samples: Training samples.
    """

    teacher: str
    identity: str
    temperature: float
    top_k: int
    seq_length: int
    vocab_size: int
    samples: int


@dataclass
class Cache:
    """An open cache.

    Attributes:
        folder: Where it is.
        header: What it holds.
        arrays: Token ids, log probabilities, those of all other tokens, and hashes of the samples' tokens.
    """

    folder: Path
    header: Header
    arrays: dict[str, np.memmap] = field(default_factory=dict[str, np.memmap])

    def open(self, mode: Any) -> "Cache":
        """Map the files, ``r`` or ``r+``."""
        self.arrays = {name: open_memmap(self.folder / f"{name}.npy", mode) for name in _shapes(self.header)}
        return self

    def create(self) -> None:
        """Make the files, which take space as they are filled."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, (shape, dtype) in _shapes(self.header).items():
            open_memmap(self.folder / f"{name}.npy", "w+", dtype, shape).flush()
        write_text(self.folder / HEADER, json.dumps(asdict(self.header), indent=1) + "\n")

    def has(self, ids: Sequence[int]) -> bool:
        """Whether the teacher has seen all of these samples."""
        return bool((self.arrays["hash"][list(ids)] != MISSING).all())

    @property
    def done(self) -> int:
        """Samples that the teacher has seen."""
        return int(np.count_nonzero(self.arrays["hash"]))

    def write(self, ids: Sequence[int], tokens: Tensor, top: TopTokens) -> None:
        """Keep what the teacher says of samples; the hash comes last, so that no entry is half there."""
        places = list(ids)
        rows = (len(places), self.header.seq_length)
        for key, values in zip(KEYS, top, strict=True):
            self.arrays[key][places] = values.reshape(*rows, *values.shape[2:]).float().cpu().numpy()
            self.arrays[key].flush()
        self.arrays["hash"][places] = _hashes(tokens.reshape(rows))
        self.arrays["hash"].flush()

    def read(self, ids: Sequence[int], tokens: Tensor) -> Batch:
        """What the teacher says of samples, shaped as ``tokens`` are.

        Raises:
            UserError: a sample is not in the cache, or not the one that the teacher saw.
        """
        places = list(ids)
        hashes = self.arrays["hash"]
        seen = [int(hashes[place]) if place < len(hashes) else MISSING for place in places]
        now = _hashes(tokens.reshape(len(places), -1))
        for place, before, after in zip(places, seen, now.tolist(), strict=True):
            if before != after:
                what = "is beyond its last one" if before == MISSING else "is not the one that the teacher saw"
                raise UserError(
                    f"distill.cache={self.folder}: training sample {place} {what}; the data, its order or the "
                    "tokenizer has changed, so make the cache anew with --mode cache-teacher"
                )
        found = {key: torch.from_numpy(self.arrays[key][places]) for key in KEYS}
        return {key: values.reshape(*tokens.shape, *values.shape[2:]) for key, values in found.items()}


def header_of(config: ConfigContainer, samples: int) -> Header:
    """The header of a cache for a run."""
    distill, vocabulary = config.distill, config.model.vocab_size
    assert distill is not None, "asked for a run that distills"
    assert distill.top_k is not None, "a rule asks for it"
    assert distill.teacher is not None, "asked for a run with a teacher"
    assert vocabulary is not None, "checked"
    return Header(
        teacher=distill.teacher,
        identity=identity(distill.teacher),
        temperature=distill.temperature,
        top_k=distill.top_k,
        seq_length=config.dataset.seq_length,
        vocab_size=vocabulary,
        samples=samples,
    )


def read_header(folder: Path) -> Header:
    """What is in ``folder``.

    Raises:
        UserError: no cache.
    """
    try:
        return Header(**json.loads((folder / HEADER).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"distill.cache={folder} holds no teacher's logits: make them with --mode cache-teacher, or unset it"
        ) from error


def check_header(folder: Path, found: Header, config: ConfigContainer) -> None:
    """Refuse a cache of another teacher, or made with other settings.

    Raises:
        UserError: naming all that differs.
    """
    distill = config.distill
    assert distill is not None, "asked for a run that distills"
    wanted = {
        "distill.temperature": (distill.temperature, found.temperature),
        "distill.top_k": (distill.top_k, found.top_k),
        "dataset.seq_length": (config.dataset.seq_length, found.seq_length),
        "model.vocab_size": (config.model.vocab_size, found.vocab_size),
    }
    differing = [f"{key} was {theirs}, not {ours}" for key, (ours, theirs) in wanted.items() if ours != theirs]
    if distill.teacher is not None and identity(distill.teacher) != found.identity:
        differing.append(f"the teacher was {found.teacher}, whose weights are not those of {distill.teacher}")
    if differing:
        raise UserError(
            f"distill.cache={folder} is of another run: {'; '.join(differing)}; use the same, or make another "
            "cache with --mode cache-teacher"
        )


def open_cache(config: ConfigContainer) -> Cache:
    """The cache that a run reads.

    Raises:
        UserError: there is none, it is of another run, or it is not complete.
    """
    assert config.distill is not None, "asked for a run that distills"
    folder = Path(config.distill.cache or "")
    header = read_header(folder)
    check_header(folder, header, config)
    cache = Cache(folder, header).open("r")
    if cache.done < header.samples:
        raise UserError(
            f"distill.cache={folder} has {cache.done} of {header.samples} samples: start --mode cache-teacher "
            "again, it goes on where it stopped"
        )
    drawn = samples_of(config.train)
    if config.dataset.dataloader_type != "cyclic" and drawn > header.samples:
        raise UserError(
            f"distill.cache={folder} has {header.samples} samples, this run draws {drawn}: train less, or make a "
            "larger one with --mode cache-teacher"
        )
    return cache


class CachedTargets(Callback):
    """Adds to each training batch what the teacher says of it."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def on_train_start(self, context: Run) -> None:
        """Before the first batch is drawn."""
        batches = context.data.train
        assert batches is not None, "a run without data"
        context.train_batches = per_chunk(WithTargets(batches, self._cache), len(context.model))


class WithTargets:
    """Microbatches with what a teacher says of them."""

    def __init__(self, batches: Batches, cache: Cache) -> None:
        self.sample_ids: list[int] = []
        self._batches = batches
        self._cache = cache

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.sample_ids = self._batches.sample_ids
        return batch | self._cache.read(self.sample_ids, batch["tokens"])

    def replicate(self) -> "WithTargets":
        """Another iterator over the same batches, from the first one."""
        return WithTargets(self._batches.replicate(), self._cache)


def targets_of(batch: Batch) -> TopTokens | None:
    """What ``WithTargets`` added."""
    return TopTokens(*(batch[key] for key in KEYS)) if KEYS[0] in batch else None


def _shapes(header: Header) -> dict[str, tuple[tuple[int, ...], Any]]:
    rows = (header.samples, header.seq_length)
    kinds = (np.int32, np.float32, np.float32)
    shapes = ((*rows, header.top_k), (*rows, header.top_k), rows)
    named = dict(zip(KEYS, zip(shapes, kinds, strict=True), strict=True))
    return {**named, "hash": ((header.samples,), np.uint64)}


def _hashes(rows: Tensor) -> np.ndarray:
    texts = rows.cpu().numpy().astype(np.int64)
    return np.array([xxhash.xxh3_64_intdigest(text.tobytes()) or 1 for text in texts], dtype=np.uint64)
