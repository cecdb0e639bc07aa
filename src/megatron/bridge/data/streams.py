# SPDX-License-Identifier: Apache-2.0
"""Microbatches of a stream: data that is read from beginning to end, with samples that have no indices.

The data is divided among a fixed number of readers. Sample ``p`` of the run is the next one of reader
``p % readers``, whichever rank has that reader, so the order does not depend on the number of ranks.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from megatron.bridge.data.finetuning.rows import Row
from megatron.bridge.data.loaders import Batch, BatchShard, collate
from megatron.bridge.data.records.samples import EncodingReport
from megatron.bridge.utils.errors import UserError


class StreamReader(Protocol):
    """An endless part of the data."""

    report: EncodingReport

    def __next__(self) -> Row: ...

    def state(self) -> bytes:
        """The position, for ``restore``."""
        ...

    def restore(self, state: bytes) -> None:
        """Continue at a saved position; must be called before reading."""
        ...


class StreamingBatchIterator:
    """A ``DataIterator`` over a stream. Rank ``r`` has the readers ``r``, ``r + dp_size``, ... and takes turns.

    Args:
        name: name of the data in messages.
        open_reader: opens the reader with the given index.
        readers: number of readers of all ranks; a multiple of the number of ranks that divides a global batch.
        shard: the part of each batch that this rank draws.
        fingerprint: everything that must be unchanged for a saved position to be valid, by key.
        consumed: samples that all ranks together have already drawn; the state of the readers must be loaded.
    """

    def __init__(
        self,
        name: str,
        open_reader: Callable[[int], StreamReader],
        readers: int,
        shard: BatchShard,
        fingerprint: dict[str, Any],
        consumed: int = 0,
    ) -> None:
        assert readers % shard.dp_size == 0, (readers, shard.dp_size)
        assert shard.global_batch_size % readers == 0, (shard.global_batch_size, readers)
        self.name = name
        self.sample_ids: list[int] = []
        self._open = open_reader
        self._count = readers
        self._shard = shard
        self._fingerprint = fingerprint
        self._mine: dict[int, StreamReader] = {}
        self._consumed = consumed
        self._drawn = 0  # by all ranks together

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        micro, _, rank, ranks = self._shard
        if self._drawn < self._consumed:
            raise UserError(
                f"the run resumes after {self._consumed:,} samples, but its checkpoint has no position in "
                f"{self.name}: resume with the dataset of the checkpoint, or load only its weights "
                f"(checkpoint.load with checkpoint.finetune)"
            )
        self.sample_ids = [self._drawn + rank + place * ranks for place in range(micro)]
        self._drawn += micro * ranks
        readers = self._readers()
        _, batch = collate([(place, next(readers[place % self._count])) for place in self.sample_ids])
        return batch

    def replicate(self, shard: BatchShard | None = None) -> "StreamingBatchIterator":
        """Another iterator over the same batches, or those of another rank, from the first one."""
        return StreamingBatchIterator(self.name, self._open, self._count, shard or self._shard, self._fingerprint)

    @property
    def report(self) -> EncodingReport:
        """What became of the records that this rank has read."""
        report = EncodingReport()
        for reader in self._mine.values():
            report.add(reader.report)
        return report

    def state_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "drawn": self._drawn,
            "readers": {number: reader.state() for number, reader in self._readers().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; ``readers`` must include this rank's."""
        assert not self._drawn, "load the state before drawing samples"
        self._check(state["fingerprint"])
        for number, reader in self._readers().items():
            reader.restore(state["readers"][number])
        self._drawn = state["drawn"]

    def _readers(self) -> dict[int, StreamReader]:
        if not self._mine:
            self._mine = {n: self._open(n) for n in range(self._shard.dp_rank, self._count, self._shard.dp_size)}
        return self._mine

    def _check(self, saved: dict[str, Any]) -> None:
        differing = [
            f"{key}={json.dumps(self._fingerprint.get(key))} instead of {json.dumps(saved.get(key))}"
            for key in {**saved, **self._fingerprint}
            if self._fingerprint.get(key) != saved.get(key)
        ]
        if differing:
            raise UserError(
                f"the checkpoint has a position in {self.name} with other settings ({', '.join(differing)}): use "
                f"the settings of the checkpoint, or load only its weights (checkpoint.load with "
                f"checkpoint.finetune)"
            )
