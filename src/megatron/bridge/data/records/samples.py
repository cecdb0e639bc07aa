# SPDX-License-Identifier: Apache-2.0
"""Tokenized samples: the tokens, and which of them are in the loss."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Sample(NamedTuple):
    """One tokenized sample."""

    tokens: np.ndarray
    """All tokens, int32."""
    trained: np.ndarray
    """Whether each token is in the loss, bool. The first one never is, because nothing predicts it."""


class Samples(Sequence[Sample]):
    """Samples concatenated in two arrays, in memory or memory-mapped.

    Args:
        tokens: int32, the tokens of all samples.
        trained: bool, of the same length.
        bounds: int64, the start of each sample, and the end of the last one.
    """

    def __init__(self, tokens: np.ndarray, trained: np.ndarray, bounds: np.ndarray) -> None:
        assert len(tokens) == len(trained) == bounds[-1], (len(tokens), len(trained), bounds[-1])
        self.tokens = tokens
        self.trained = trained
        self.bounds = bounds

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> "Samples":
        kept = list(samples)
        bounds = np.concatenate(([0], np.cumsum([len(sample.tokens) for sample in kept], dtype=np.int64)))
        tokens = [sample.tokens for sample in kept] or [np.empty(0, np.int32)]
        trained = [sample.trained for sample in kept] or [np.empty(0, np.bool_)]
        return cls(np.concatenate(tokens), np.concatenate(trained), bounds)

    @classmethod
    def concatenate(cls, parts: Sequence["Samples"]) -> "Samples":
        if not parts:
            return cls.of([])
        starts = np.cumsum([0, *(part.bounds[-1] for part in parts[:-1])])
        bounds = [part.bounds[1:] + start for part, start in zip(parts, starts, strict=True)]
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.trained for part in parts]),
            np.concatenate([np.zeros(1, np.int64), *bounds]),
        )

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride] - no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(int(self.bounds[index]), int(self.bounds[index + 1]))
        return Sample(self.tokens[part], self.trained[part])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample."""
        return np.diff(self.bounds)


@dataclass
class EncodingReport:
    """What became of the records of a source. The field names are keys of the files on disk."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens in the loss."""
    cut: int = 0
    """Samples that were shortened."""
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    """What is unusual but kept, and how often it occurs."""
    formats: Counter[str] = field(default_factory=Counter)
    """Number of records of each format."""

    def add(self, other: "EncodingReport") -> None:
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for ``from_dict``."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EncodingReport":
        fields: Any = {
            name: Counter(value) if isinstance(value, dict) else value for name, value in values.items()
        }
        return cls(**fields)

    def lines(self) -> Iterator[str]:
        """The report for people, one sentence each, without counts of zero."""
        losses = [f"{count:,} dropped {reason}" for reason, count in self.dropped.items()]
        cut = [f"{self.cut:,} cut"] if self.cut else []
        share = f"{self.trained / self.tokens:.0%}" if self.tokens else "none"
        yield ", ".join([f"{self.samples:,} samples", *cut, *losses])
        yield f"{self.tokens:,} tokens, {self.trained:,} of them in the loss ({share})"
        texts = self.formats["Text"]
        if 0 < texts < self.formats.total():
            yield f"{texts:,} records are plain text among conversations or pairs, with all tokens in the loss"
        yield from (f"{count:,} {note}" for note, count in self.notes.items())
