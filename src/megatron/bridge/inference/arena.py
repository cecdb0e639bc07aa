# SPDX-License-Identifier: Apache-2.0
"""Which tokens of the caches belong to whom: consecutive ranges, given out and taken back."""

from bisect import bisect_left, insort

ALIGNMENT = 16
"""Extents begin at multiples of this many tokens, so that their addresses are as aligned as any vector needs."""


class Arena:
    """``size`` tokens, of which ranges are taken first-fit.

    Example:
        >>> arena = Arena(64)
        >>> arena.take(10), arena.take(30), arena.take(30)
        (0, 16, None)
        >>> arena.give_back(0), arena.free
        (None, 32)
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self._holes: list[tuple[int, int]] = [(0, self.size)] if self.size else []
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Tokens that nobody has, in one piece or several."""
        return sum(length for _, length in self._holes)

    def take(self, count: int) -> int | None:
        """The first token of a new range of at least ``count`` tokens; None if no hole is large enough."""
        wanted = rounded(count)
        for index, (start, length) in enumerate(self._holes):
            if length >= wanted:
                self._shrink(index, wanted)
                self._taken[start] = wanted
                return start
        return None

    def grow(self, start: int, count: int) -> bool:
        """Enlarge the range at ``start`` to ``count`` tokens if the tokens behind it are free."""
        length, wanted = self._taken[start], rounded(count)
        end = start + length
        index = bisect_left(self._holes, (end, 0))
        missing = wanted - length
        if index == len(self._holes) or self._holes[index][0] != end or self._holes[index][1] < missing:
            return False
        self._shrink(index, missing)
        self._taken[start] = wanted
        return True

    def give_back(self, start: int) -> None:
        insort(self._holes, (start, self._taken.pop(start)))
        index = bisect_left(self._holes, (start, 0))
        for left in (index, index - 1):  # join with the hole behind, then with the one before
            if 0 <= left < len(self._holes) - 1 and sum(self._holes[left]) == self._holes[left + 1][0]:
                joined = self._holes[left][0], self._holes[left][1] + self._holes[left + 1][1]
                self._holes[left : left + 2] = [joined]

    def length(self, start: int) -> int:
        return self._taken[start]

    def _shrink(self, index: int, count: int) -> None:
        start, length = self._holes[index]
        self._holes[index : index + 1] = [(start + count, length - count)] if length > count else []


def rounded(count: int) -> int:
    """``count`` tokens as an extent takes them."""
    return -(-count // ALIGNMENT) * ALIGNMENT
