# SPDX-License-Identifier: Apache-2.0
"""Collecting the preview of a run's data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron.bridge.data.dataset_config import DatasetConfig
from megatron.bridge.data.finetuning.rows import BlendedRows, EpochRows
from megatron.bridge.data.loaders import (
    Batch,
    BatchIterator,
    BatchShard,
    DataIterator,
    Iterators,
    make_iterator,
)
from megatron.bridge.data.media.processor import MediaProcessor
from megatron.bridge.data.media.references import AudioReference, MediaReference, VideoReference
from megatron.bridge.data.pretraining.gpt_builder import FIMDataset
from megatron.bridge.data.records.samples import EncodingReport, Sample
from megatron.bridge.data.streams import StreamingBatchIterator
from megatron.bridge.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class CorpusShare:
    """What a split draws from one corpus."""

    name: str  # path prefix
    documents: int  # documents of the corpus that belong to the split
    tokens: int
    samples: int  # samples of the run that are cut from them


@dataclass(frozen=True)
class CorpusPreview:
    name: str  # ``train``, ``valid`` or ``test``
    samples: int | None  # samples of the run; None for a stream, which has no end
    seq_length: int
    shares: list[CorpusShare]  # the corpora; empty for mock data and streams

    def lines(self) -> Iterator[str]:
        """The preview for people, one sentence each."""
        if self.samples is None:
            yield f"a stream of samples with {self.seq_length:,} tokens each"
            return
        yield f"{self.samples:,} samples x {self.seq_length:,} = {self.samples * self.seq_length:,} tokens"
        for share in self.shares:
            epochs = share.samples * self.seq_length / share.tokens
            yield (
                f"{share.samples / self.samples:.1%} from {share.name}: {epochs:.2f} epochs of its "
                f"{share.documents:,} documents, {share.tokens:,} tokens"
            )


def preview_corpora(name: str, dataset: Any, seq_length: int) -> CorpusPreview:
    """The corpora behind ``dataset``, and how much is drawn from each. This reads no samples."""
    if not hasattr(dataset, "__len__"):
        return CorpusPreview(name, None, seq_length, [])
    return CorpusPreview(name, len(dataset), seq_length, _corpus_shares(dataset))


def _corpus_shares(dataset: Any) -> list[CorpusShare]:
    if isinstance(dataset, FIMDataset):
        dataset = dataset.dataset
    if isinstance(dataset, BlendedDataset):
        drawn = np.bincount(dataset.dataset_index, minlength=len(dataset.datasets)).tolist()
        return [
            _corpus_share(part, count) for part, count in zip(dataset.datasets, drawn, strict=True)
        ]
    return [_corpus_share(dataset, len(dataset))] if isinstance(dataset, GPTDataset) else []


def _corpus_share(corpus: Any, samples: int) -> CorpusShare:
    lengths = corpus.dataset.sequence_lengths[corpus.indices]
    return CorpusShare(
        str(corpus.dataset_path), len(lengths), int(lengths.sum(dtype=np.int64)), samples
    )


BINS = 12
SHOWN_RANKS = 16
SHOWN_TOKENS = 256


@dataclass(frozen=True)
class TextSegment:
    """Consecutive tokens that are all in the loss, or all not."""

    text: str
    tokens: int
    trained: bool
    image: MediaReference | None = None  # the image or video that the tokens belong to


@dataclass(frozen=True)
class SplitPreview:
    """The data of one split, or one part of a blend."""

    name: str  # ``train``, ``valid`` or ``test``, followed by the number of the part in a blend
    source: str
    report: EncodingReport
    longest: int  # tokens of the longest sample
    median: float
    mean: float
    histogram: list[tuple[int, int]]  # number of samples up to each length, as (length, number)
    rows: int
    fill: (
        float | None
    )  # fraction of the rows that is not padding; None if rows have no fixed length
    samples: list[list[TextSegment]]
    media: str  # the processors of images and videos; "" without one
    titles: list[str]  # of each sample: its number, which answer of a pair it is, or its label


@dataclass(frozen=True)
class RankBatch:
    """The first microbatch of a data-parallel rank."""

    rank: int
    samples: list[int]  # positions of its samples in the order of the run
    tokens: int  # input tokens, including padding
    trained: int
    sequences: int  # samples, of which a packed row holds several
    images: int | None  # tokens of images; None where there are none


@dataclass(frozen=True)
class Preview:
    splits: list[SplitPreview] = field(default_factory=list)  # data of records
    corpora: list[CorpusPreview] = field(default_factory=list)  # data without records
    texts: list[list[TextSegment]] = field(
        default_factory=list
    )  # the first rows of training data without records
    first_batches: list[RankBatch] = field(
        default_factory=list
    )  # the first microbatch of each of the first ranks

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a JSON file, without the text of samples."""
        splits = [
            {
                name: value
                for name, value in vars(split).items()
                if name not in ("report", "samples", "titles")
            }
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
    """Look at ``samples`` of each split of a run's data, without drawing from its iterators."""
    splits = []
    corpora = []
    iterators = {"train": data.train, "valid": data.valid, "test": data.test}
    iterators |= {f"valid {name}": batches for name, batches in data.valid_sets.items()}
    for name, iterator in iterators.items():
        dataset = iterator.dataset if isinstance(iterator, BatchIterator) else iterator
        parts = list(_parts_of_blend(name, dataset))
        splits += [_preview_split(part_name, part, tokenizer, samples) for part_name, part in parts]
        if dataset is not None and not parts:
            corpora.append(preview_corpora(name, dataset, config.seq_length))
    first = list(_first_batches(config, data.train, sizes))
    batches = [batch for batch, _ in first]
    described = [of_rank for _, of_rank in first]
    count = min(samples, len(batches[0]["tokens"])) if first and corpora else 0
    texts = [segments(_beginning_of_row(batches[0], row), tokenizer) for row in range(count)]
    return Preview(splits, corpora, texts, described)


def _parts_of_blend(name: str, dataset: Any) -> Iterator[tuple[str, EpochRows]]:
    """The datasets of a blend, one by one; nothing for data without records."""
    if isinstance(dataset, EpochRows):
        yield name, dataset
    elif isinstance(dataset, BlendedRows):
        for index, part in enumerate(dataset.parts):
            yield f"{name} {index}", part


def _preview_split(
    name: str, dataset: EpochRows, tokenizer: Tokenizer, samples: int
) -> SplitPreview:
    rows = dataset.rows
    lengths = rows.samples.lengths
    titles = rows.titles(samples)
    return SplitPreview(
        name=name,
        source=dataset.source,
        report=dataset.report,
        longest=int(lengths.max()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        histogram=histogram(lengths),
        rows=len(rows),
        fill=rows.fill,
        media=rows.media.description(dataset.report.videos > 0) if rows.media else "",
        samples=[
            segments(rows.samples[index], tokenizer, rows.media) for index in range(len(titles))
        ],
        titles=titles,
    )


def histogram(lengths: np.ndarray, bins: int = BINS) -> list[tuple[int, int]]:
    """Number of samples in bins of equal width, each with its largest length.

    Example:
        >>> histogram(np.array([1, 2, 4]), bins=2)
        [(2, 2), (4, 1)]
    """
    longest = int(lengths.max())
    width = -(-longest // bins)
    counts = np.bincount((lengths - 1) // width, minlength=-(-longest // width))
    return [((bin_index + 1) * width, int(count)) for bin_index, count in enumerate(counts)]


def segments(
    sample: Sample, tokenizer: Tokenizer, media: MediaProcessor | None = None
) -> list[TextSegment]:
    """The text of a sample, split where the loss or an image begins and ends."""
    images = _image_places(sample, media)
    edges = {
        *(np.flatnonzero(np.diff(sample.trained)) + 1).tolist(),
        *(edge for part in images for edge in part),
    }
    bounds = [0, *sorted(edges - {0, len(sample.tokens)}), len(sample.tokens)]
    return [
        _make_segment(sample, start, stop, images.get((start, stop)), tokenizer)
        for start, stop in pairwise(bounds)
    ]


def _make_segment(
    sample: Sample, start: int, stop: int, image: MediaReference | None, tokenizer: Tokenizer
) -> TextSegment:
    trained = bool(sample.trained[start])
    if image is None:
        return TextSegment(
            tokenizer.detokenize(sample.tokens[start:stop].tolist()), stop - start, trained
        )
    label = f"[{_described(image)} -> {stop - start} tokens]"
    return TextSegment(label, stop - start, trained, image)


def _described(media: MediaReference) -> str:
    """The kind and size of an image, a video or a recording."""
    if isinstance(media, AudioReference):
        return f"audio {media.seconds:.1f} s"
    size = f"{media.width}x{media.height}"
    if isinstance(media, VideoReference):
        return f"video {size}, {media.frames} frames"
    return f"image {size}"


def _image_places(
    sample: Sample, media: MediaProcessor | None
) -> dict[tuple[int, int], MediaReference]:
    """From the first token of each image to its last one, with tokens for the ends of rows between them."""
    if media is None or not sample.images:
        return {}
    places = np.flatnonzero(np.isin(sample.tokens, media.token_ids)).tolist()
    image_of_span = {}
    first = 0
    for image in sample.images:
        count = media.tokens(image)
        image_of_span[places[first], places[first + count - 1] + 1] = image
        first += count
    return image_of_span


def _beginning_of_row(batch: Batch, row: int) -> Sample:
    tokens = np.concatenate((batch["tokens"][row, :1].numpy(), batch["labels"][row].numpy()))
    trained = np.concatenate((np.zeros(1, np.bool_), batch["loss_mask"][row].numpy() > 0))
    return Sample(tokens[:SHOWN_TOKENS], trained[:SHOWN_TOKENS])


def _first_batches(
    config: DatasetConfig, train: DataIterator | None, sizes: tuple[int, int, int]
) -> Iterator[tuple[Batch, RankBatch]]:
    micro, global_size, ranks = sizes
    if train is None or (isinstance(train, BatchIterator) and len(train.dataset) < global_size):
        return
    for rank in range(min(ranks, SHOWN_RANKS)):
        shard = BatchShard(micro, global_size, rank, ranks)
        if isinstance(train, StreamingBatchIterator):
            batches = train.replicate(shard)
        else:
            assert isinstance(train, BatchIterator), type(train)
            batches = make_iterator(train.dataset, config, shard, prefetch=False)
        batch = next(batches)
        ids = batches.sample_ids
        dataset: Any = batches.dataset if isinstance(batches, BatchIterator) else None
        images = (
            sum(map(dataset.image_tokens, ids)) if getattr(dataset, "has_images", False) else None
        )
        tokens = batch["tokens"].numel()
        trained = int(batch["loss_mask"].sum())
        yield batch, RankBatch(rank, ids, tokens, trained, _count_sequences(batch), images)


def _count_sequences(batch: Batch) -> int:
    """Number of sequences with tokens in the loss; padding at the end of a packed row is one without."""
    if "cu_seqlens" not in batch:
        return len(batch["tokens"])
    bounds: Sequence[int] = batch["cu_seqlens"].tolist()
    mask = batch["loss_mask"][0]
    return sum(bool(mask[start:stop].any()) for start, stop in pairwise(bounds))
