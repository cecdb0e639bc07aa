# SPDX-License-Identifier: Apache-2.0
"""Microbatches of a stream: data that is read from beginning to end, with samples that have no indices.

The data is divided among a fixed number of readers. Sample ``p`` of the run is the next one of reader
``p % readers``, whichever rank has that reader, so the order does not depend on the number of ranks.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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


@dataclass(eq=False)
class StreamingBatchIterator:
    """A ``DataIterator`` over a stream. Rank ``r`` has the readers ``r``, ``r + dp_size``, ... and takes turns."""

    name: str  # name of the data in messages
    open_reader: Callable[[int], StreamReader]  # opens the reader with the given index
    readers: int  # number of readers of all ranks; a multiple of the number of ranks that divides a global batch
    shard: BatchShard  # the part of each batch that this rank draws
    fingerprint: dict[
        str, Any
    ]  # everything that must be unchanged for a saved position to be valid, by key
    consumed: int = 0  # samples that all ranks together have already drawn; the state of the readers must be loaded
    sample_ids: list[int] = field(default_factory=list[int], init=False)
    _mine: dict[int, StreamReader] = field(default_factory=dict[int, StreamReader], init=False)
    _drawn: int = field(default=0, init=False)  # by all ranks together

    def __post_init__(self) -> None:
        assert self.readers % self.shard.dp_size == 0, (self.readers, self.shard)
        assert self.shard.global_batch_size % self.readers == 0, (self.shard, self.readers)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        micro, _, rank, ranks = self.shard
        if self._drawn < self.consumed:
            raise UserError(
                f"the run resumes after {self.consumed:,} samples, but its checkpoint has no position in "
                f"{self.name}: resume with the dataset of the checkpoint, or load only its weights "
                f"(checkpoint.load with checkpoint.finetune)"
            )
        self.sample_ids = [self._drawn + rank + index * ranks for index in range(micro)]
        self._drawn += micro * ranks
        opened = self._opened()
        _, batch = collate(
            [(index, next(opened[index % self.readers])) for index in self.sample_ids]
        )
        return batch

    def replicate(self, shard: BatchShard | None = None) -> "StreamingBatchIterator":
        """Another iterator over the same batches, or those of another rank, from the first one."""
        return replace(self, shard=shard or self.shard, consumed=0)

    @property
    def report(self) -> EncodingReport:
        """What became of the records that this rank has read."""
        report = EncodingReport()
        for reader in self._mine.values():
            report.add(reader.report)
        return report

    def state_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "drawn": self._drawn,
            "readers": {index: reader.state() for index, reader in self._opened().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; ``readers`` must include this rank's."""
        assert not self._drawn, "load the state before drawing samples"
        self._check(state["fingerprint"])
        for index, reader in self._opened().items():
            reader.restore(state["readers"][index])
        self._drawn = state["drawn"]

    def _opened(self) -> dict[int, StreamReader]:
        if not self._mine:
            numbers = range(self.shard.dp_rank, self.readers, self.shard.dp_size)
            self._mine = {index: self.open_reader(index) for index in numbers}
        return self._mine

    def _check(self, saved: dict[str, Any]) -> None:
        differing = [
            f"{key}={json.dumps(self.fingerprint.get(key))} instead of {json.dumps(saved.get(key))}"
            for key in {**saved, **self.fingerprint}
            if self.fingerprint.get(key) != saved.get(key)
        ]
        if differing:
            raise UserError(
                f"the checkpoint has a position in {self.name} with other settings ({', '.join(differing)}): use "
                f"the settings of the checkpoint, or load only its weights (checkpoint.load with "
                f"checkpoint.finetune)"
            )
