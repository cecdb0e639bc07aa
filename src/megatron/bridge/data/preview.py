# SPDX-License-Identifier: Apache-2.0
"""What a run is going to see: counts, lengths, packing, the text of samples, the first batch of each rank.

Of data without records (indexed corpora, made-up samples, streams) it is the corpora and what is drawn from each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from megatron.bridge.data.config import SPLITS, DatasetConfig
from megatron.bridge.data.corpora import CorpusPreview, as_example, look_at
from megatron.bridge.data.examples import Example, Report
from megatron.bridge.data.loaders import KEYS, Batch, Batches, BatchIterator, BatchSizes, Iterators, iterate
from megatron.bridge.data.rows import BlendedRows, Epochs, PackedRows
from megatron.bridge.data.streams import StreamedBatches
from megatron.bridge.data.tokenizer import Tokenizer

BINS = 12
SHOWN_RANKS = 16


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens that are all learnt, or all not.

    Attributes:
        text: what they say.
        tokens: how many they are.
        learnt: whether the loss is taken on them.
    """

    text: str
    tokens: int
    learnt: bool


@dataclass(frozen=True)
class SplitPreview:
    """The data of one purpose, or one part of a blend.

    Attributes:
        name: ``train``, ``valid`` or ``test``, and the number of the part in a blend.
        report: what became of the records.
        longest: tokens of the longest sample.
        median: tokens of the median sample.
        mean: tokens of the mean sample.
        histogram: number of samples up to each length, as (length, number).
        rows: rows of an epoch.
        fill: fraction of the rows that is not padding; None where rows have no fixed length.
        samples: pieces of the first samples.
    """

    name: str
    report: Report
    longest: int
    median: float
    mean: float
    histogram: list[tuple[int, int]]
    rows: int
    fill: float | None
    samples: list[list[Piece]]


@dataclass(frozen=True)
class RankBatch:
    """The first microbatch of a data-parallel rank.

    Attributes:
        rank: data-parallel rank.
        samples: numbers of its samples in the order of the run.
        tokens: inputs in it, padding included.
        learnt: targets that count.
        sequences: samples that it holds.
    """

    rank: int
    samples: list[int]
    tokens: int
    learnt: int
    sequences: int


@dataclass(frozen=True)
class Preview:
    """All of it.

    Attributes:
        splits: data of records.
        corpora: data without records.
        texts: pieces of the first rows of training data without records.
        first_batches: those of the first ranks.
    """

    splits: list[SplitPreview] = field(default_factory=list)
    corpora: list[CorpusPreview] = field(default_factory=list)
    texts: list[list[Piece]] = field(default_factory=list)
    first_batches: list[RankBatch] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a JSON file, without the texts of samples."""
        splits = [
            {name: value for name, value in vars(split).items() if name not in ("report", "samples")}
            | {"report": split.report.to_dict()}
            for split in self.splits
        ]
        return {
            "splits": splits,
            "corpora": [asdict(corpus) for corpus in self.corpora],
            "first_batches": [asdict(batch) for batch in self.first_batches],
        }


def preview(
    config: DatasetConfig,
    data: Iterators,
    tokenizer: Tokenizer,
    sizes: tuple[int, int, int],
    samples: int = 3,
) -> Preview:
    """Look at the data of a run, without drawing from it.

    Args:
        config: the data set's config.
        data: the iterators that it made.
        tokenizer: the tokenizer of the run.
        sizes: micro batch, global batch, and number of data-parallel ranks.
        samples: how many to show of each split.
    """
    splits, corpora = [], []
    for name, iterator in zip(SPLITS, data, strict=True):
        dataset = iterator.dataset if isinstance(iterator, BatchIterator) else iterator
        parts = list(_parts(name, dataset))
        splits += [_split(part_name, part, tokenizer, samples) for part_name, part in parts]
        if dataset is not None and not parts:
            corpora.append(look_at(name, dataset, config.seq_length))
    first = list(_first_batches(config, data.train, sizes))
    rows = _rows(first[0][1], samples) if first and corpora else []
    texts = [pieces(as_example(row), tokenizer) for row in rows]
    return Preview(splits, corpora, texts, [_rank_batch(rank, batch, ids) for rank, batch, ids in first])


def _parts(name: str, dataset: Any) -> Iterator[tuple[str, Epochs]]:
    """The data sets of a blend, one by one; none of data without records."""
    if isinstance(dataset, Epochs):
        yield name, dataset
    elif isinstance(dataset, BlendedRows):
        for number, part in enumerate(dataset.parts):
            yield f"{name} {number}", part


def _split(name: str, dataset: Epochs, tokenizer: Tokenizer, samples: int) -> SplitPreview:
    rows = dataset.rows
    lengths = rows.examples.lengths
    return SplitPreview(
        name=name,
        report=dataset.report,
        longest=int(lengths.max()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        histogram=histogram(lengths),
        rows=len(rows),
        fill=_fill(rows),
        samples=[pieces(rows.examples[place], tokenizer) for place in range(min(samples, len(lengths)))],
    )


def _fill(rows: Any) -> float | None:
    if isinstance(rows, PackedRows):
        return rows.fill
    length = getattr(rows, "seq_length", None)
    return None if length is None else float((rows.examples.lengths - 1).sum()) / (len(rows) * length)


def histogram(lengths: np.ndarray, bins: int = BINS) -> list[tuple[int, int]]:
    """Number of samples in steps of equal width, each with its largest length.

    Example:
        >>> histogram(np.array([1, 2, 4]), bins=2)
        [(2, 2), (4, 1)]
    """
    longest = int(lengths.max())
    width = -(-longest // bins)
    counts = np.bincount((lengths - 1) // width, minlength=-(-longest // width))
    return [((place + 1) * width, int(count)) for place, count in enumerate(counts)]


def pieces(example: Example, tokenizer: Tokenizer) -> list[Piece]:
    """The text of a sample, cut where learning begins and ends."""
    edges = np.flatnonzero(np.diff(example.trained)) + 1
    return [
        Piece(tokenizer.detokenize(tokens.tolist()), len(tokens), bool(trained[0]))
        for tokens, trained in zip(np.split(example.tokens, edges), np.split(example.trained, edges), strict=True)
    ]


def _first_batches(
    config: DatasetConfig, train: Batches | None, sizes: tuple[int, int, int]
) -> Iterator[tuple[int, Batch, list[int]]]:
    """Rank, first microbatch and numbers of its samples, for the first ranks."""
    micro, whole, ranks = sizes
    if train is None or (isinstance(train, BatchIterator) and len(train.dataset) < whole):
        return
    for rank in range(min(ranks, SHOWN_RANKS)):
        each = BatchSizes(micro, whole, rank, ranks)
        if isinstance(train, StreamedBatches):
            batches = train.replicate(each)
        else:
            assert isinstance(train, BatchIterator), type(train)
            batches = iterate(train.dataset, config, each, ahead=False)
        yield rank, next(batches), batches.sample_ids


def _rank_batch(rank: int, batch: Batch, ids: list[int]) -> RankBatch:
    return RankBatch(rank, ids, batch["tokens"].numel(), int(batch["loss_mask"].sum()), _sequences(batch))


def _rows(batch: Batch, count: int) -> list[dict[str, Any]]:
    return [{key: batch[key][place] for key in KEYS} for place in range(min(count, len(batch["tokens"])))]


def _sequences(batch: Batch) -> int:
    """Sequences with something to learn; padding at the end of a packed row is one without."""
    if "cu_seqlens" not in batch:
        return len(batch["tokens"])
    bounds: Sequence[int] = batch["cu_seqlens"].tolist()
    mask = batch["loss_mask"][0]
    return sum(bool(mask[start:stop].any()) for start, stop in pairwise(bounds))
