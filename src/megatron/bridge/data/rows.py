# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch: one sample each and padding, several samples each, or samples joined without padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.bridge.data.examples import Example, Examples, Report
from megatron.bridge.data.packing import pack, rounded_up

Row = dict[str, Any]


class PaddedRows(Dataset[Row]):
    """One sample a row, filled up to ``seq_length``.

    Args:
        examples: the samples.
        seq_length: length of a row.
        padding: token that fills rows up; it is never learnt.
    """

    def __init__(self, examples: Sequence[Example], seq_length: int, padding: int) -> None:
        self.examples = examples
        self.seq_length = seq_length
        self.padding = padding

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Row:
        return row_of([self.examples[index]], self.padding, 1, self.seq_length, packed=False)


class PackedRows(Dataset[Row]):
    """As many samples a row as fit, so that hardly any padding is left.

    Attention and positions start again at each sample: ``cu_seqlens`` (int32) says where they begin and end.

    Args:
        examples: the samples.
        seq_length: length of a row, a multiple of ``multiple``.
        padding: token that fills samples and rows up; it is never learnt.
        multiple: each sample is filled up to a multiple of this, for context parallelism.
    """

    def __init__(self, examples: Examples, seq_length: int, padding: int, multiple: int = 1) -> None:
        assert seq_length % multiple == 0, (seq_length, multiple)
        self.examples = examples
        self.seq_length = seq_length
        self.padding = padding
        self.multiple = multiple
        self.plan = pack(rounded_up(examples.lengths - 1, multiple), seq_length)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Row:
        examples = [self.examples[place] for place in self.plan[index].tolist()]
        return row_of(examples, self.padding, self.multiple, self.seq_length, packed=True)

    @property
    def fill(self) -> float:
        """Fraction of all rows that is not padding."""
        tokens = int(self.examples.lengths.sum()) - len(self.examples)
        return tokens / (len(self) * self.seq_length)


class OpenRows(Dataset[Row]):
    """One sample a row and as long as it is: the samples of a microbatch are joined to one row.

    Args:
        examples: the samples.
        padding: token that fills samples up; it is never learnt.
        multiple: each sample is filled up to a multiple of this.
    """

    def __init__(self, examples: Sequence[Example], padding: int, multiple: int = 1) -> None:
        self.examples = examples
        self.padding = padding
        self.multiple = multiple

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Row:
        return row_of([self.examples[index]], self.padding, self.multiple, None, packed=True)


def row_of(examples: Sequence[Example], padding: int, multiple: int, seq_length: int | None, packed: bool) -> Row:
    """One row of the given samples.

    Args:
        examples: the samples; one, unless ``packed``.
        padding: token that fills up; it is never learnt.
        multiple: with ``packed``, each sample is filled up to a multiple of this.
        seq_length: length of the row; None: that of its samples.
        packed: whether the row says where its samples begin and end.
    """
    if not packed:
        assert seq_length is not None, "a row of one sample has a length"
        row = _joined(examples, [seq_length], padding)
        del row["cu_seqlens"]
        return row
    lengths = rounded_up(np.array([len(example.tokens) - 1 for example in examples]), multiple).tolist()
    return _joined(examples, lengths, padding, seq_length)


def _joined(examples: Sequence[Example], lengths: Sequence[int], padding: int, total: int | None = None) -> Row:
    """Samples of the given lengths one behind the other; what is left of ``total`` is a sequence of padding."""
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    if total is not None and bounds[-1] < total:
        bounds = np.append(bounds, total)
    length = int(bounds[-1])
    tokens, labels = np.full((2, length), padding, dtype=np.int64)
    loss_mask = np.zeros(length, dtype=np.float32)
    for start, example in zip(bounds.tolist(), examples, strict=False):
        place = slice(start, start + len(example.tokens) - 1)
        tokens[place], labels[place] = example.tokens[:-1], example.tokens[1:]
        loss_mask[place] = example.trained[1:]  # position i predicts token i + 1
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss_mask),
        "position_ids": torch.from_numpy(np.arange(length) - np.repeat(bounds[:-1], np.diff(bounds))),
        "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
    }


class Epochs(Dataset[Row]):
    """Rows over and over, in a new order each epoch.

    Args:
        rows: what there is.
        size: number of rows to present.
        seed: seed of the order, which depends on it and the epoch only; None keeps the rows' own order.
        report: what became of the records behind the rows, for whoever looks at the data.
    """

    def __init__(self, rows: Dataset[Row], size: int, seed: int | None, report: Report | None = None) -> None:
        self.rows: Any = rows
        self.size = size
        self.seed = seed
        self.report = report or Report()
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.size:
            raise IndexError(index)
        epoch, place = divmod(index, len(self.rows))
        return self.rows[self._row(epoch, place)]

    def _row(self, epoch: int, place: int) -> int:
        if self.seed is None:
            return place
        known = self._order  # another thread may replace it meanwhile
        if known is None or known[0] != epoch:
            known = (epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.rows)))
            self._order = known
        return int(known[1][place])


class BlendedRows(Dataset[Row]):
    """Rows of several data sets, so that at every moment their shares are as near to the weights as can be.

    Args:
        parts: the data sets, each of at least ``size`` rows.
        weights: their shares.
        size: number of rows to present.
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
