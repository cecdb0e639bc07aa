# SPDX-License-Identifier: Apache-2.0
"""Microbatches that are made just before the step that reads them."""

from collections import deque
from collections.abc import Sequence
from typing import Any


class RefilledBatches:
    """An iterator over microbatches that are added step by step."""

    def __init__(self) -> None:
        self._batches: deque[dict[str, Any]] = deque()

    def __iter__(self) -> "RefilledBatches":
        return self

    def __next__(self) -> dict[str, Any]:
        assert self._batches, "a step reads no more microbatches than it was given"
        return self._batches.popleft()

    def refill(self, batches: Sequence[dict[str, Any]]) -> None:
        self._batches = deque(batches)
