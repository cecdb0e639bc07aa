# SPDX-License-Identifier: Apache-2.0
"""Microbatches from data that is read forwards only: its samples have no numbers to go back to.

The data is shared out among a fixed number of readers. Sample p of the run's order is the next one of reader
p % readers, whichever rank that reader belongs to, so the order does not depend on the number of ranks.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from megatron.bridge.data.examples import Report
from megatron.bridge.data.loaders import Batch, BatchSizes, collate
from megatron.bridge.data.rows import Row
from megatron.bridge.utils.errors import UserError


class Reader(Protocol):
    """One share of the data, without end."""

    report: Report

    def __next__(self) -> Row:
        """The next row.

        Raises:
            UserError: a record is wrong, or there is none.
        """
        ...

    def state(self) -> bytes:
        """Where it stands."""
        ...

    def restore(self, state: bytes) -> None:
        """Go on where ``state`` was taken, before anything was read."""
        ...


class StreamedBatches:
    """Microbatches of one data-parallel rank: rank r has the readers r, r + ranks, ... and reads them in turn.

    Args:
        name: what people call the data.
        open_reader: opens a reader by its number.
        readers: how many there are for all ranks; a multiple of the ranks that divides a global batch.
        sizes: which part of a batch this rank draws.
        fingerprint: what a position in the data is only good for, by key.
        consumed: samples that all ranks together drew before; where the readers stood then must be restored.

    Attributes:
        sample_ids: places of the samples of the last batch in the order of the run.
    """

    def __init__(
        self,
        name: str,
        open_reader: Callable[[int], Reader],
        readers: int,
        sizes: BatchSizes,
        fingerprint: dict[str, Any],
        consumed: int = 0,
    ) -> None:
        assert readers % sizes.ranks == 0, (readers, sizes.ranks)
        assert sizes.whole % readers == 0, (sizes.whole, readers)
        self.name = name
        self.sample_ids: list[int] = []
        self._open = open_reader
        self._count = readers
        self._sizes = sizes
        self._fingerprint = fingerprint
        self._mine: dict[int, Reader] = {}
        self._consumed = consumed
        self._drawn = 0  # by all ranks together

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        sizes = self._sizes
        if self._drawn < self._consumed:
            raise UserError(
                f"the run goes on behind {self._consumed:,} samples, but its checkpoint does not know where "
                f"{self.name} was read: go on with the data of the checkpoint, or take its weights only "
                f"(checkpoint.load with checkpoint.finetune)"
            )
        self.sample_ids = [self._drawn + sizes.rank + place * sizes.ranks for place in range(sizes.micro)]
        self._drawn += sizes.micro * sizes.ranks
        readers = self._readers()
        _, batch = collate([(place, next(readers[place % self._count])) for place in self.sample_ids])
        return batch

    def replicate(self, sizes: BatchSizes | None = None) -> "StreamedBatches":
        """Another iterator over the same batches, or those of another rank, from the first one."""
        return StreamedBatches(self.name, self._open, self._count, sizes or self._sizes, self._fingerprint)

    @property
    def report(self) -> Report:
        """What became of the records that this rank has read."""
        report = Report()
        for reader in self._mine.values():
            report.add(reader.report)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's readers stand."""
        return {
            "fingerprint": self._fingerprint,
            "drawn": self._drawn,
            "readers": {number: reader.state() for number, reader in self._readers().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; ``readers`` must hold this rank's at least.

        Raises:
            UserError: the state is that of other data, or of other readers.
        """
        assert not self._drawn, "some samples were drawn"
        self._check(state["fingerprint"])
        for number, reader in self._readers().items():
            reader.restore(state["readers"][number])
        self._drawn = state["drawn"]

    def _readers(self) -> dict[int, Reader]:
        if not self._mine:
            self._mine = {n: self._open(n) for n in range(self._sizes.rank, self._count, self._sizes.ranks)}
        return self._mine

    def _check(self, saved: dict[str, Any]) -> None:
        differing = [
            f"{key}={json.dumps(self._fingerprint.get(key))} instead of {json.dumps(saved.get(key))}"
            for key in {**saved, **self._fingerprint}
            if self._fingerprint.get(key) != saved.get(key)
        ]
        if differing:
            raise UserError(
                f"the checkpoint knows where {self.name} was read with other settings ({', '.join(differing)}): "
                f"use those of the checkpoint, or take its weights only (checkpoint.load with checkpoint.finetune)"
            )
