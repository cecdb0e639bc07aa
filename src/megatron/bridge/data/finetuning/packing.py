# SPDX-License-Identifier: Apache-2.0
"""Packing: which samples share a row, and how a packed row is divided among context-parallel ranks."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

TRIED_ROWS = 64
"""Rows that a sample with images is tried in; trying all would make packing quadratic in the number of samples."""


def pack(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    images: Sequence[int] | np.ndarray | None = None,
    image_capacity: int = 0,
) -> list[np.ndarray]:
    """Distribute samples over rows by best-fit decreasing.

    The longest sample comes first, and each goes to the row where it leaves the least space.

    Example:
        >>> [row.tolist() for row in pack([3, 5, 2, 8, 6], 8)]
        [[0, 1], [2, 4], [3]]

    Lengths are positive and at most ``capacity``; ``images``, if any, are tokens of images of each sample, at most
    ``image_capacity``. The indices of the samples in a row ascend, rows are ordered by their first sample, and every
    sample is in exactly one row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert not len(sizes) or (sizes.min() > 0 and sizes.max() <= capacity), "a sample does not fit"
    needed = np.zeros_like(sizes) if images is None else np.asarray(images, dtype=np.int64)
    assert not len(needed) or needed.max() <= image_capacity, "the images of a sample do not fit"
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)
    count = 0
    rows_with: dict[int, list[int]] = {}  # rows by the space left in them
    spaces: list[int] = []  # the keys of rows_with, sorted
    image_space: list[int] = []  # of each row
    for sample, size, image_tokens in zip(
        order.tolist(), sizes[order].tolist(), needed[order].tolist(), strict=True
    ):
        best_row = _best_row(spaces, rows_with, image_space, size, image_tokens)
        if best_row is not None:
            space_index, index = best_row
            space = spaces[space_index]
            row = rows_with[space].pop(index)
            if not rows_with[space]:
                del rows_with[space], spaces[space_index]
        else:
            space = capacity
            row = count
            image_space.append(image_capacity)
            count += 1
        row_of[sample] = row
        image_space[row] -= image_tokens
        if left := space - size:
            if left not in rows_with:
                insort(spaces, left)
            rows_with.setdefault(left, []).append(row)
    return _samples_of_rows(row_of, count)


def _best_row(
    spaces: list[int],
    rows_with: dict[int, list[int]],
    image_space: list[int],
    size: int,
    image_tokens: int,
) -> tuple[int, int] | None:
    """Where the least space that a sample fits in is in ``spaces``, and where a row is among those that have it."""
    tried = 0
    for space_index in range(bisect_left(spaces, size), len(spaces)):
        rows = rows_with[spaces[space_index]]
        for index in reversed(range(len(rows))):
            if image_space[rows[index]] >= image_tokens:
                return space_index, index
            if (tried := tried + 1) == TRIED_ROWS:
                return None
    return None


def _samples_of_rows(row_of: np.ndarray, count: int) -> list[np.ndarray]:
    """The samples of each row. Rows are ordered by their first sample."""
    if not count:
        return []
    by_row = np.argsort(row_of, kind="stable")
    ends = np.cumsum(np.bincount(row_of, minlength=count))
    rows = np.split(by_row, ends[:-1])
    first = np.array([row[0] for row in rows])
    return [rows[index] for index in np.argsort(first, kind="stable")]


def rounded_up(lengths: np.ndarray, multiple: int) -> np.ndarray:
    return -(-lengths // multiple) * multiple


def cut_for_rank(boundaries: np.ndarray, rank: int, size: int) -> np.ndarray:
    """The positions of a packed row that one context-parallel rank holds.

    Each sequence is cut into ``2 * size`` equal chunks. A rank gets one from the front and the mirrored one from
    the back, so that causal attention is equal work for all ranks.

    ``boundaries`` are the start of each sequence and the end of the last one; lengths are multiples of ``2 * size``.
    """
    parts = []
    for start, stop in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        chunk, rest = divmod(stop - start, 2 * size)
        assert rest == 0, (
            f"a sequence of {stop - start} tokens cannot be cut into {2 * size} chunks"
        )
        parts += [np.arange(chunk) + start + index * chunk for index in (rank, 2 * size - 1 - rank)]
    return np.concatenate(parts)
