# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch: one padded sample, one sample without padding, or several packed samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.bridge.data.finetuning.packing import pack, rounded_up
from megatron.bridge.data.media.processor import MediaProcessor
from megatron.bridge.data.media.references import MediaReference
from megatron.bridge.data.records.samples import EncodingReport, Sample, Samples

Row = dict[str, Any]
TOKEN_KEYS = ("tokens", "labels", "loss_mask", "padding_mask", "position_ids")
"""Keys of a row with a value for each token."""


class LocatedSample(NamedTuple):
    """A sample that has not been read yet."""

    samples: Samples
    index: int

    @property
    def length(self) -> int:
        """Tokens in a row: all but the last one, which is only a label."""
        bounds = self.samples.bounds
        return int(bounds[self.index + 1] - bounds[self.index]) - 1

    def read(self) -> Sample:
        return self.samples[self.index]


class RowImages(NamedTuple):
    """The images and videos of a row; they are decoded when a batch is made."""

    media: MediaProcessor
    references: list[MediaReference]


@dataclass(eq=False)
class SampleRows(Dataset[Row]):
    """Rows with one sample each, without padding if ``seq_length`` is None. Those of a microbatch are concatenated."""

    has_cu_seqlens: ClassVar[bool] = True  # whether rows hold the boundaries of several samples

    samples: Samples
    seq_length: int | None  # length of a row; None: that of its sample
    padding: int  # the padding token, which is never in the loss
    multiple: int = 1  # in rows with ``cu_seqlens``, pad each sample to a multiple of this, for context parallelism
    media: MediaProcessor | None = (
        None  # rows then have ``images``, and positions of three axes if need be
    )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Row:
        samples = [self.samples[sample_index] for sample_index in self._places(index)]
        row = make_row(samples, self.padding, self.multiple, self.seq_length, self.has_cu_seqlens)
        return row if self.media is None else with_images(row, samples, self.media)

    def _places(self, index: int) -> Sequence[int]:
        """The indices of the samples of a row."""
        return [index]

    def located_samples(self, index: int) -> list[LocatedSample]:
        """The samples of a row, without reading them."""
        return [LocatedSample(self.samples, sample_index) for sample_index in self._places(index)]

    def titles(self, count: int) -> list[str]:
        """What the first samples are to a reader, those of ``count`` records."""
        return [f"sample {index + 1}" for index in range(min(count, len(self.samples)))]

    @property
    def has_images(self) -> bool:
        """Whether rows may have images or videos."""
        return self.media is not None

    def image_tokens(self, index: int) -> int:
        """Tokens of images and videos of a row."""
        return sum(map(self._image_tokens, self._places(index)))

    def _image_tokens(self, index: int) -> int:
        return 0 if self.media is None else self.media.total_tokens(self.samples.images_of(index))

    @property
    def fill(self) -> float | None:
        """Fraction of all rows that is not padding; None if rows have no fixed length."""
        if self.seq_length is None:
            return None
        return float((self.samples.lengths - 1).sum()) / (len(self) * self.seq_length)


class PaddedRows(SampleRows):
    """One sample in each row, padded to ``seq_length``."""

    has_cu_seqlens: ClassVar[bool] = False


class PackedRows(SampleRows):
    """As many samples in each row as fit, so that little padding is needed.

    Attention and positions restart at each sample. ``multiple`` must divide ``seq_length``. A row has at most as many
    tokens of images as a sample may have.
    """

    def __init__(
        self,
        samples: Samples,
        seq_length: int,
        padding: int,
        multiple: int = 1,
        media: MediaProcessor | None = None,
    ) -> None:
        assert seq_length % multiple == 0, (seq_length, multiple)
        super().__init__(samples, seq_length, padding, multiple, media)
        image_limit = media.max_image_tokens if media else None
        images = None if image_limit is None else list(map(self._image_tokens, range(len(samples))))
        self.plan = pack(
            rounded_up(samples.lengths - 1, multiple), seq_length, images, image_limit or 0
        )

    def __len__(self) -> int:
        return len(self.plan)

    def _places(self, index: int) -> list[int]:
        return self.plan[index].tolist()


def make_row(
    samples: Sequence[Sample],
    padding: int,
    multiple: int,
    seq_length: int | None,
    has_cu_seqlens: bool,
) -> Row:
    """One row of the given samples; see ``SampleRows`` for the parameters."""
    if not has_cu_seqlens:
        assert seq_length is not None, "a row without cu_seqlens has a fixed length"
        row = _concatenate_samples(samples, [seq_length], padding)
        del row["cu_seqlens"]
        return row
    lengths = rounded_up(
        np.array([len(sample.tokens) - 1 for sample in samples], dtype=np.int64), multiple
    ).tolist()
    return _concatenate_samples(samples, lengths, padding, seq_length)


def packed_batch(samples: Sequence[Sample], padding: int, multiple: int) -> dict[str, Any]:
    """A microbatch of one row [1, length] with all samples, as long as they are.

    Args:
        samples: The samples; without any, the row is two tokens of padding or ``multiple`` of them.
        padding: The padding token.
        multiple: Each sample is padded to a multiple of this.
    """
    length = None if samples else max(multiple, 2)
    row = make_row(samples, padding, multiple, length, has_cu_seqlens=True)
    bounds = row["cu_seqlens"]
    return {name: row[name].unsqueeze(0) for name in TOKEN_KEYS} | {
        "attention_mask": None,
        "cu_seqlens": bounds,
        "max_seqlen": int(bounds.diff().max()),
    }


def with_images(row: Row, samples: Sequence[Sample], media: MediaProcessor) -> Row:
    """``row`` with the images of its samples, and with positions [3, length] where the model has three axes."""
    row["images"] = RowImages(media, [image for sample in samples for image in sample.images])
    if media.has_grids:
        tokens = row["tokens"].numpy()
        bounds = row["cu_seqlens"].tolist() if "cu_seqlens" in row else [0, len(tokens)]
        images = [sample.images for sample in samples] + [()] * len(bounds)
        parts = [
            media.positions(tokens[start:stop], sample_images)
            for (start, stop), sample_images in zip(pairwise(bounds), images, strict=False)
        ]
        row["position_ids"] = torch.from_numpy(np.concatenate(parts, axis=1))
    return row


def _concatenate_samples(
    samples: Sequence[Sample], lengths: Sequence[int], padding: int, total: int | None = None
) -> Row:
    """Samples padded to the given lengths; the rest of ``total`` becomes a sequence of padding."""
    bounds = np.concatenate(([0], np.cumsum(np.array(lengths, dtype=np.int64))))
    if total is not None and bounds[-1] < total:
        bounds = np.append(bounds, total)
    length = int(bounds[-1])
    tokens, labels = np.full((2, length), padding, dtype=np.int64)
    loss_mask = np.zeros(length, dtype=np.float32)
    padding_mask = np.ones(length, dtype=np.bool_)
    for start, sample in zip(bounds.tolist(), samples, strict=False):
        span = slice(start, start + len(sample.tokens) - 1)
        tokens[span], labels[span] = sample.tokens[:-1], sample.tokens[1:]
        loss_mask[span] = sample.trained[1:]  # position i predicts token i + 1
        padding_mask[span] = False
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss_mask),
        "padding_mask": torch.from_numpy(padding_mask),
        "position_ids": torch.from_numpy(
            np.arange(length) - np.repeat(bounds[:-1], np.diff(bounds))
        ),
        "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
    }


@dataclass(eq=False)
class EpochRows(Dataset[Row]):
    """The rows of another dataset over and over, in a new order each epoch."""

    rows: Any
    size: int  # number of rows to present
    seed: int | None  # the order depends on it and the epoch only; None keeps that of ``rows``
    report: EncodingReport = field(
        default_factory=EncodingReport
    )  # what became of the records, for the preview
    source: str = ""  # where the records are, for the preview
    _order: tuple[int, np.ndarray] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.rows[self.row_at(index)]

    def row_at(self, index: int) -> int:
        """The index of a row in ``rows``; ``index`` may be beyond the number of rows to present."""
        return self._row(*divmod(index, len(self.rows)))

    @property
    def has_images(self) -> bool:
        return getattr(self.rows, "has_images", False)

    def image_tokens(self, index: int) -> int:
        return self.rows.image_tokens(self.row_at(index))

    def located_samples(self, index: int) -> list[LocatedSample]:
        return self.rows.located_samples(self.row_at(index))

    def _row(self, epoch: int, index: int) -> int:
        if self.seed is None:
            return index
        known = self._order  # another thread may replace it meanwhile
        if known is None or known[0] != epoch:
            known = (epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.rows)))
            self._order = known
        return int(known[1][index])


class BlendedRows(Dataset[Row]):
    """Rows of several datasets, ordered so that their shares are as close to the weights as possible at any time.

    Each of the ``parts`` has at least ``size`` rows, which is the number to present.
    """

    def __init__(self, parts: Sequence[Dataset[Row]], weights: Sequence[float], size: int) -> None:
        from megatron.core.datasets import helpers

        self.parts: list[Any] = list(parts)
        self.part_of = np.zeros(size, dtype=np.int16)
        self.place_in = np.zeros(size, dtype=np.int64)
        shares = np.array(weights, dtype=np.float64) / sum(weights)
        build: Any = helpers.build_blending_indices  # pyright: ignore[reportAttributeAccessIssue] - compiled
        build(self.part_of, self.place_in, shares, len(self.parts), size, False)

    def __len__(self) -> int:
        return len(self.part_of)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.parts[self.part_of[index]][int(self.place_in[index])]

    @property
    def has_images(self) -> bool:
        return all(getattr(part, "has_images", False) for part in self.parts)

    def image_tokens(self, index: int) -> int:
        return self.parts[self.part_of[index]].image_tokens(int(self.place_in[index]))

    def located_samples(self, index: int) -> list[LocatedSample]:
        return self.parts[self.part_of[index]].located_samples(int(self.place_in[index]))
