# SPDX-License-Identifier: Apache-2.0
"""How layers are divided among pipeline stages: balanced by time, with the embedding and the loss counted."""

from collections.abc import Sequence


def balanced(times: Sequence[float], parts: int, last: float) -> list[int] | None:
    """How many layers each part gets, so that the slowest part is as fast as possible.

    Args:
        times: Of the layers, in order.
        parts: Chunks of all stages, in the order of layers.
        last: Time of what follows the last layer: the output layer, the loss, and layers that predict ahead.

    Returns:
        A count for each part, at least 1 for all but the last; None if there are too few layers.

    Example:
        >>> balanced([1.0] * 10, 4, 1.0)
        [3, 3, 3, 1]
    """
    if len(times) < parts - 1 or not parts:
        return None
    low, high = max([*times, last]), sum(times) + last
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _fill(times, parts, last, middle) else (middle, high)
    return _fill(times, parts, last, high * (1 + 1e-9))


def _fill(times: Sequence[float], parts: int, last: float, most: float) -> list[int] | None:
    """Fill parts in order up to ``most`` seconds, with layers left for all that follow."""
    counts, index = [], 0
    for part in range(parts):
        end = part == parts - 1
        used, count = (last if end else 0.0), 0
        spare = len(times) - index - max(parts - part - 2, 0)
        while index < len(times) and used + times[index] <= most and count < (len(times) if end else spare):
            used, count, index = used + times[index], count + 1, index + 1
        if used > most or (not count and not end):
            return None
        counts.append(count)
    return counts if index == len(times) else None


def spelled(counts: Sequence[int], ahead: int) -> str:
    """The layout in Megatron-Core's spelling: E the embedding, t a layer, m one that predicts ahead, L the loss.

    Example:
        >>> spelled([2, 2, 1], 1)
        'Ett|tt|tmL'
    """
    parts = ["t" * count for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * ahead + "L"
    return "|".join(parts)
