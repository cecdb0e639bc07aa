# SPDX-License-Identifier: Apache-2.0
"""Tokenised samples: which tokens there are, and which of them are to be learnt."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Example(NamedTuple):
    """One sample.

    Attributes:
        tokens: int32, all tokens.
        trained: bool, of the same length; the first token is never a target, because nothing predicts it.
    """

    tokens: np.ndarray
    trained: np.ndarray


class Examples(Sequence[Example]):
    """Samples one behind the other in two arrays, in memory or mapped from a file.

    Args:
        tokens: int32, all tokens of all samples.
        trained: bool, of the same length.
        bounds: int64, where each sample begins, and the end of the last.
    """

    def __init__(self, tokens: np.ndarray, trained: np.ndarray, bounds: np.ndarray) -> None:
        assert len(tokens) == len(trained) == bounds[-1], (len(tokens), len(trained), bounds[-1])
        self.tokens = tokens
        self.trained = trained
        self.bounds = bounds

    @classmethod
    def of(cls, examples: Iterable[Example]) -> "Examples":
        """The samples in arrays."""
        kept = list(examples)
        bounds = np.concatenate(([0], np.cumsum([len(example.tokens) for example in kept], dtype=np.int64)))
        tokens = [example.tokens for example in kept] or [np.empty(0, np.int32)]
        trained = [example.trained for example in kept] or [np.empty(0, np.bool_)]
        return cls(np.concatenate(tokens), np.concatenate(trained), bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> Example:  # pyright: ignore[reportIncompatibleMethodOverride] - no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(int(self.bounds[index]), int(self.bounds[index + 1]))
        return Example(self.tokens[part], self.trained[part])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample."""
        return np.diff(self.bounds)


@dataclass
class Report:
    """What became of the records of a source.

    Attributes:
        records: records read.
        samples: samples kept.
        tokens: tokens of the kept samples.
        trained: those of them that are learnt.
        cut: samples that were shortened.
        dropped: reasons, and how many samples each took.
        notes: what is unusual but kept, and how often.
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Report") -> None:
        """Add up with ``other``."""
        for name in ("records", "samples", "tokens", "trained", "cut"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped.update(other.dropped)
        self.notes.update(other.notes)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, that ``from_dict`` reads."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Report":
        """What ``to_dict`` wrote."""
        fields: Any = {
            name: Counter(value) if isinstance(value, dict) else value for name, value in values.items()
        }
        return cls(**fields)

    def lines(self) -> Iterator[str]:
        """Sentences for people; what nothing happened to is not mentioned."""
        losses = [f"{count:,} dropped {reason}" for reason, count in self.dropped.items()]
        cut = [f"{self.cut:,} cut"] if self.cut else []
        share = f"{self.trained / self.tokens:.0%}" if self.tokens else "none"
        yield ", ".join([f"{self.samples:,} examples", *cut, *losses])
        yield f"{self.tokens:,} tokens, {self.trained:,} of them learnt ({share})"
        yield from (f"{count:,} {note}" for note, count in self.notes.items())
