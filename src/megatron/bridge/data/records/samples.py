# SPDX-License-Identifier: Apache-2.0
"""Tokenized samples: the tokens, and their loss mask."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megatron.bridge.data.media.references import MediaReference, reference_of


class Sample(NamedTuple):
    tokens: np.ndarray  # all tokens, int32
    # whether each token is in the loss, bool. The first one never is, because nothing predicts it.
    trained: np.ndarray
    images: tuple[
        MediaReference, ...
    ] = ()  # images, videos and audio, in the order of their tokens


class Samples(Sequence[Sample]):
    """Samples concatenated in arrays, in memory or memory-mapped.

    Args:
        tokens: int32, the tokens of all samples.
        trained: bool, of the same length.
        bounds: int64, the start of each sample, and the end of the last one.
        images: uint8, the references to the images, videos and audio of all samples as JSON; None if there are none.
        image_bounds: int64, the start of each sample's references, and the end of the last one.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        trained: np.ndarray,
        bounds: np.ndarray,
        images: np.ndarray | None = None,
        image_bounds: np.ndarray | None = None,
    ) -> None:
        assert len(tokens) == len(trained) == bounds[-1], (len(tokens), len(trained), bounds[-1])
        self.tokens = tokens
        self.trained = trained
        self.bounds = bounds
        self.images = np.empty(0, np.uint8) if images is None else images
        self.image_bounds = np.zeros_like(bounds) if image_bounds is None else image_bounds
        assert len(self.images) == self.image_bounds[-1], (len(self.images), self.image_bounds[-1])

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> "Samples":
        sample_list = list(samples)
        tokens = [sample.tokens for sample in sample_list] or [np.empty(0, np.int32)]
        trained = [sample.trained for sample in sample_list] or [np.empty(0, np.bool_)]
        images = [
            json.dumps(sample.images).encode() if sample.images else b"" for sample in sample_list
        ]
        return cls(
            np.concatenate(tokens),
            np.concatenate(trained),
            _bounds_of(map(len, (sample.tokens for sample in sample_list))),
            np.frombuffer(b"".join(images), np.uint8),
            _bounds_of(map(len, images)),
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Samples"]) -> "Samples":
        if not parts:
            return cls.of([])
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.trained for part in parts]),
            _bounds_of(length for part in parts for length in part.lengths),
            np.concatenate([part.images for part in parts]),
            _bounds_of(length for part in parts for length in np.diff(part.image_bounds)),
        )

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride] - no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(int(self.bounds[index]), int(self.bounds[index + 1]))
        return Sample(self.tokens[part], self.trained[part], self.images_of(index))

    def images_of(self, index: int) -> tuple[MediaReference, ...]:
        start = int(self.image_bounds[index])
        end = int(self.image_bounds[index + 1])
        if start == end:
            return ()
        return tuple(map(reference_of, json.loads(self.images[start:end].tobytes())))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)


def _bounds_of(lengths: Iterable[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(list(lengths), dtype=np.int64)))


@dataclass
class EncodingReport:
    """Counts and notes on the records of a source. The field names are keys of the files on disk."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0  # tokens in the loss
    images: int = 0
    videos: int = 0
    recordings: int = 0
    image_tokens: int = 0  # tokens that images, videos and audio are made of
    cut: int = 0  # samples that were shortened
    dropped: Counter[str] = field(default_factory=Counter)
    # reason -> the place of the first record that was dropped for it
    first_dropped: dict[str, str] = field(default_factory=dict[str, str])
    notes: Counter[str] = field(
        default_factory=Counter
    )  # unusual property of a kept sample -> count
    formats: Counter[str] = field(default_factory=Counter)  # number of records of each format

    @property
    def media(self) -> int:
        """Number of images, videos and recordings."""
        return self.images + self.videos + self.recordings

    def drop(self, reason: str, location: str) -> None:
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, location)

    def add(self, report: "EncodingReport") -> None:
        for name, value in vars(report).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, dict):
                setattr(self, name, value | getattr(self, name))
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EncodingReport":
        fields: Any = {
            name: Counter(value) if isinstance(value, dict) and name != "first_dropped" else value
            for name, value in values.items()
        }
        return cls(**fields)

    def lines(self) -> Iterator[str]:
        """Return the report as text, one sentence per item, without counts of zero."""
        losses = [
            f"{count:,} dropped {reason}"
            + (f" (first: {location})" if (location := self.first_dropped.get(reason)) else "")
            for reason, count in self.dropped.items()
        ]
        cut = [f"{self.cut:,} truncated"] if self.cut else []
        share = f"{self.trained / self.tokens:.0%}" if self.tokens else "none"
        yield ", ".join([f"{self.samples:,} samples", *cut, *losses])
        yield f"{self.tokens:,} tokens, {self.trained:,} of them in the loss ({share})"
        texts = self.formats["Text"]
        if 0 < texts < self.formats.total():
            yield f"{texts:,} records are plain text among conversations or pairs, with all tokens in the loss"
        if media := self.media:
            counts = {"recordings": self.recordings, "images": self.images, "videos": self.videos}
            names = [f"{count:,} {name}" for name, count in counts.items() if count]
            yield (
                f"{' and '.join(names)}, {self.image_tokens / media:,.0f} tokens each, "
                f"{self.image_tokens / self.tokens:.0%} of all tokens"
            )
        yield from (f"{count:,} {note}" for note, count in self.notes.items())
