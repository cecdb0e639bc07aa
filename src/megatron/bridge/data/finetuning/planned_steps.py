# SPDX-License-Identifier: Apache-2.0
"""The steps of a run in which data-parallel ranks share long samples: see ``context_plan``."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megatron.bridge.data.finetuning.context_plan import (
    ContextSharing,
    PlannedMicrobatch,
    plan_batch,
    sample_multiple,
)
from megatron.bridge.data.finetuning.rows import LocatedSample, packed_batch

NumberedBatch = tuple[list[int], dict[str, Any]]
"""The indices of the rows that a microbatch has samples of, and the microbatch."""


@dataclass(eq=False)
class PlannedSteps(Dataset[list[NumberedBatch]]):
    """The microbatches of a rank, step by step.

    A microbatch has two more keys: ``cp_size``, how many ranks share it, and ``microbatches``, how many the step has.

    Attributes:
        rows: Packed rows of samples, of which a global batch takes the next ones.
        global_batch_size: Rows of a step, over all ranks.
        rank: This data-parallel rank.
        ranks: Data-parallel ranks, a power of two.
        sharing: How they share samples.
        padding: The padding token.
    """

    rows: Any
    global_batch_size: int
    rank: int
    ranks: int
    sharing: ContextSharing
    padding: int

    def __len__(self) -> int:
        return len(self.rows) // self.global_batch_size

    def __getitem__(self, step: int) -> list[NumberedBatch]:
        located = self.located_samples(step)
        lengths = np.array([sample.length for _, sample in located])
        plan = plan_batch(lengths, self.ranks, self.sharing)[self.rank]
        return [self._microbatch(microbatch, located, len(plan)) for microbatch in plan]

    def located_samples(self, step: int) -> list[tuple[int, LocatedSample]]:
        """The samples of a global batch with the indices of their rows."""
        first = step * self.global_batch_size
        return [
            (row, sample)
            for row in range(first, first + self.global_batch_size)
            for sample in self.rows.located_samples(row)
        ]

    def _microbatch(
        self, planned: PlannedMicrobatch, located: list[tuple[int, LocatedSample]], count: int
    ) -> NumberedBatch:
        members = [located[index] for index in planned.samples]
        batch = packed_batch(
            [sample.read() for _, sample in members],
            self.padding,
            sample_multiple(self.sharing.multiple, planned.ranks),
        )
        row_ids = sorted({row for row, _ in members})
        return row_ids, batch | {"cp_size": planned.ranks, "microbatches": count}
