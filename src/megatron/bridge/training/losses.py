# SPDX-License-Identifier: Apache-2.0
"""From what the loss functions of microbatches report to the losses of a global batch, equal on all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.bridge.utils.dist import broadcast_object

Report = dict[str, torch.Tensor]


class LossTotals:
    """Adds up what microbatches report. The names of the losses are those of the first batch.

    Only the last pipeline stage has losses; the others learn the names once, then a step costs one small broadcast
    (the optimizer has synchronised the stages anyway, for the norm of the gradients).
    """

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def __call__(self, reports: list[Report]) -> Report:
        """Sums and counts over all microbatches of all ranks, by name; on every rank.

        Args:
            reports: One per microbatch on the last pipeline stage, none elsewhere. A value is a tensor of two, the
                sum and the number of what was summed, or one number, which counts once per microbatch.

        Returns:
            A tensor of two (float64) by name.
        """
        stages: Any = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        names = sorted(reports[0]) if reports else []
        if self._names is None:
            self._names = broadcast_object(names, last, stages)
        if not self._names:
            return {}
        if reports:
            assert names == self._names, f"the loss function reported {self._names} before and now {names}"
            table = _over_replicas(reports, names)
        else:
            device = torch.cuda.current_device()
            table = torch.empty(len(self._names), 2, dtype=torch.float64, device=device)
        if stages.size() > 1:
            dist.broadcast(table, src=last, group=stages)
        return dict(zip(self._names, table, strict=True))


def means(totals: Report) -> Report:
    """Sum over count; not a number where nothing counted."""
    return {name: total[0] / total[1] for name, total in totals.items()}


def _over_replicas(reports: list[Report], names: list[str]) -> torch.Tensor:
    table = torch.stack([sum_and_count(report[name]) for report in reports for name in names])
    table = table.view(len(reports), len(names), 2).sum(0)
    replicas: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1:
        dist.all_reduce(table, group=replicas)
    return table


def sum_and_count(value: torch.Tensor) -> torch.Tensor:
    """A reported value as a tensor of two (float64); one number counts once."""
    value = value.detach().double().flatten()
    return value if value.numel() == 2 else torch.cat((value, torch.ones_like(value)))
