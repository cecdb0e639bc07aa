# SPDX-License-Identifier: Apache-2.0
"""One forward pass of decoding for the layers: a packed row of the new tokens of several requests."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

ROW_MULTIPLE = 8
"""Rows are padded to this multiple. On CPUs, a row then has the same bits in any batch: matrix products do not
depend on the number of rows, and no element is left over for the scalar code at the end of a tensor, if widths are
multiples of 8."""


def padded_rows(rows: int) -> int:
    """Round ``rows`` up to a multiple of ``ROW_MULTIPLE``, at least one."""
    return max(ROW_MULTIPLE, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)


@dataclass(frozen=True)
class TokenSpan:
    """The new tokens of one request: rows ``row .. row + count`` at positions ``start ..`` of its text."""

    row: int
    count: int
    start: int
    extent: int  # first token of the request's keys and values in the caches
    slot: int  # index of the request's recurrent states
    long: bool = False  # whether the text is so long that rotary embeddings use their frequencies for long texts
    ahead: Tensor | None = (
        None  # [1, count], number of later tokens that each token sees; None: no later ones
    )


@dataclass(frozen=True)
class SpanGroup:
    """Spans of equal length whose recurrent states advance together; a group of single tokens is padded."""

    rows: Tensor  # [spans * count], row by row
    slots: Tensor  # [spans]; -1 for padding
    count: int
    tokens: int  # rows without padding
    fresh: bool  # the texts begin in this step, so their states are zero


@dataclass(frozen=True)
class Extents:
    """The places of a step's texts, in int32 on the device, and the longest lengths."""

    rows: Tensor  # [texts + 1], bounds of their new tokens
    keys: Tensor  # [texts + 1], start of each text's keys in the caches; the last one is not used
    lengths: Tensor  # [texts], number of keys of each text
    longest: tuple[int, int]  # new tokens, keys


class DecodingStep:
    """At least one span, in the order of their rows and without gaps, followed by padding."""

    def __init__(self, spans: Sequence[TokenSpan], device: torch.device) -> None:
        self.spans = spans
        self.tokens = spans[-1].row + spans[-1].count
        self.rows = padded_rows(self.tokens)
        self.device = device
        places = [span.extent + span.start + index for span in spans for index in range(span.count)]
        self.places = torch.tensor(places, device=device)
        """Place of each new token in the caches, [tokens]."""
        positions = [span.start + index for span in spans for index in range(span.count)]
        self.positions = torch.tensor(positions + [0] * (self.rows - self.tokens), device=device)
        """Positions [rows]; 0 for padding."""
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}
        """Tables of ``c_kernels.attend``, made once for all layers of a kind."""

    def table(self, first: Tensor) -> Tensor:
        """Return the ``tokens`` of ``c_kernels.attend``; ``first`` has the position of the first key that each sees."""
        positions = self.positions[: self.tokens]
        rows = torch.arange(self.tokens)
        first = first[: self.tokens]
        return torch.stack(
            (rows, self.places, self.places - positions + first, positions + 1 - first), dim=1
        )

    @cached_property
    def long_rows(self) -> Tensor:
        """Return a boolean [rows, 1, 1, 1], true for rows of long texts."""
        flags = [span.long for span in self.spans for _ in range(span.count)]
        flags += [False] * (self.rows - self.tokens)
        return torch.tensor(flags, device=self.device).view(-1, 1, 1, 1)

    @cached_property
    def extents(self) -> Extents:
        """Return the extents for kernels that attend to the keys of all texts at once."""
        lengths = [span.start + span.count for span in self.spans]
        bounds = [*(span.row for span in self.spans), self.tokens]
        table = torch.tensor(
            [bounds, [*(span.extent for span in self.spans), 0], [*lengths, 0]], dtype=torch.int32
        ).to(self.device)
        return Extents(
            table[0],
            table[1],
            table[2, :-1],
            (max(span.count for span in self.spans), max(lengths)),
        )

    @cached_property
    def groups(self) -> list[SpanGroup]:
        """Group all single tokens; longer spans, and several spans of one text, are separate groups."""
        spans_of = Counter(span.slot for span in self.spans)
        later: list[TokenSpan] = []
        groups: list[SpanGroup] = []
        for span in self.spans:
            if span.count == 1 and span.start and spans_of[span.slot] == 1:
                later.append(span)
            else:
                groups.append(self._group([span]))
        return [self._group(later), *groups] if later else groups

    def _group(self, spans: list[TokenSpan]) -> SpanGroup:
        first = spans[0]
        rows = [span.row + index for span in spans for index in range(span.count)]
        padding = padded_rows(len(rows)) - len(rows) if first.count == 1 and first.start else 0
        slots = [span.slot for span in spans]
        return SpanGroup(
            torch.tensor(rows + rows[:1] * padding, device=self.device),
            torch.tensor(slots + [-1] * padding, device=self.device),
            first.count,
            len(rows),
            first.start == 0,
        )


class SingleTokens(DecodingStep):
    """A step of one token of each text, read from tensors that change in place, so that it can be replayed.

    Recurrent layers continue the states of all texts, so none may begin in this step.

    Args:
        positions: [rows] of the new tokens.
        keys: [rows], start of each text's keys in the caches.
        slots: [rows], index of each text's recurrent states; -1 for padding.
        longest: maximum number of keys of a text.
    """

    def __init__(self, positions: Tensor, keys: Tensor, slots: Tensor, longest: int) -> None:
        self.tables = {}
        self._keys = keys
        self._slots = slots
        self.tokens = self.rows = len(positions)
        self.device = positions.device
        self.positions = positions
        self.places = keys + positions
        bounds = torch.arange(self.rows + 1, device=self.device, dtype=torch.int32)
        padded = torch.nn.functional.pad(keys, (0, 1)).int()
        rows = torch.arange(self.rows, device=self.device)
        self.groups = [SpanGroup(rows, slots, 1, self.rows, fresh=False)]
        self.extents = Extents(bounds, padded, (positions + 1).int(), (1, longest))

    @cached_property
    def spans(self) -> list[TokenSpan]:  # type: ignore[override] - read when a layer needs them
        """Read the spans without padding; a recording may not, because it would keep the numbers of one step."""
        numbers = torch.stack((self.positions, self._keys, self._slots), dim=1).tolist()
        return [
            TokenSpan(row, 1, start, extent, slot)
            for row, (start, extent, slot) in enumerate(numbers)
            if slot >= 0
        ]
