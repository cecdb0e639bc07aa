# SPDX-License-Identifier: Apache-2.0
"""Reduce the reports of the loss function for microbatches to the losses of a global batch, equal on all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.bridge.utils.distributed import broadcast_object
from megatron.bridge.utils.errors import UserError

LossReport = dict[str, torch.Tensor]


class LossTotals:
    """Sums the reports of microbatches over all ranks. The first batch determines the names of the losses.

    Only the last pipeline stage has losses; the others receive the names once, then each step needs one small
    broadcast (the optimizer synchronizes the stages anyway, to compute the gradient norm).
    """

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def __call__(self, reports: list[LossReport]) -> LossReport:
        """Sums and counts over all microbatches of all ranks, float64 tensors by name, equal on all ranks.

        ``reports`` has one per microbatch on the last pipeline stage, none elsewhere. A value is a tensor with two
        elements, a sum and a count, or a scalar, which has count 1.
        """
        stages: Any = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        names = sorted(reports[0]) if reports else []
        if self._names is None:
            self._names = broadcast_object(names, last, stages)
        if not self._names:
            return {}
        if reports:
            if names != self._names:
                raise UserError(
                    f"the loss function reported {', '.join(self._names)} before, and now {', '.join(names)}: "
                    "report the same names for each microbatch"
                )
            table = _sum_over_replicas(reports, names)
        else:
            device = torch.cuda.current_device()
            table = torch.empty(len(self._names), 2, dtype=torch.float64, device=device)
        if stages.size() > 1:
            dist.broadcast(table, src=last, group=stages)
        return dict(zip(self._names, table, strict=True))


def mean_losses(totals: LossReport) -> LossReport:
    """The mean of each loss; NaN where the count is zero."""
    return {name: total[0] / total[1] for name, total in totals.items()}


def _sum_over_replicas(reports: list[LossReport], names: list[str]) -> torch.Tensor:
    table = torch.stack([sum_and_count(report[name]) for report in reports for name in names])
    table = table.view(len(reports), len(names), 2).sum(0)
    replicas: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1:
        dist.all_reduce(table, group=replicas)
    return table


def sum_and_count(value: torch.Tensor) -> torch.Tensor:
    """A reported value as a float64 tensor of sum and count; a scalar has count 1."""
    value = value.detach().double().flatten()
    return value if value.numel() == 2 else torch.cat((value, torch.ones_like(value)))
