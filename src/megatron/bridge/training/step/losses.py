# SPDX-License-Identifier: Apache-2.0
"""The losses of a global batch, equal on all ranks: those of the loss function, of MTP layers and of routers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron.bridge.backends.kernels import mtp_loss
from megatron.bridge.training.config import ConfigContainer
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


_BALANCING_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


@contextmanager
def collect_mtp_losses() -> Iterator[LossReport]:
    """Collect sums and counts of the multi-token-prediction losses; `router_losses` reads the router losses."""
    get_moe_metrics_tracker().clear()  # a step may be repeated
    with mtp_loss.collect_losses() as totals:
        yield totals


def add_mtp_losses(totals: LossReport, reports: list[LossReport]) -> list[LossReport]:
    """Add an equal part of ``totals`` to the report of each microbatch: only the sum of the reports is used."""
    return [
        report | {name: total / len(reports) for name, total in totals.items()}
        for report in reports
    ]


def router_losses(config: ConfigContainer) -> LossReport:
    """Mean router losses of the step over layers and all tokens that are no padding; equal on all ranks.

    The losses are not multiplied with their coefficients: perfectly balanced experts have a load-balancing loss
    of 1. Megatron-Core's own reduction takes its groups from the routers of a rank, and a pipeline stage without
    experts has none; it also weights microbatches and ranks alike, whatever padding they have.
    """
    names = _router_loss_names(config.model)
    if not names:
        return {}
    tracker = get_moe_metrics_tracker()
    recorded: dict[str, torch.Tensor] = getattr(tracker, "weighted", {})
    layers = config.model.num_layers + (config.model.mtp_num_layers or 0)
    device = torch.cuda.current_device()
    table = torch.zeros(len(names), 2, layers, dtype=torch.float64, device=device)
    for row, name in enumerate(names):
        if name in recorded:
            table[row] += recorded[name][:, :layers]
    dist.all_reduce(table)
    sums, tokens = table.unbind(1)
    layers_with_router = (tokens > 0).sum(1)
    means = (sums / tokens.clamp(min=1)).sum(1) / layers_with_router.clamp(min=1)
    return dict(zip(names, means, strict=True))


def has_router_losses(model: Any) -> bool:
    """Whether a model has losses that are attached to its layers, of routers or of indexers."""
    return bool(_router_loss_names(model))


def _router_loss_names(model: Any) -> list[str]:
    names = []
    if model.num_moe_experts:
        names += [
            _BALANCING_NAMES[kind]
            for kind, coefficient in _balancing_types(model)
            if kind in _BALANCING_NAMES and coefficient
        ]
        if model.moe_z_loss_coeff is not None:
            names.append("z_loss")
    if getattr(model, "dsa_indexer_loss_coeff", None):
        names.append("indexer_loss")
    return names


def _balancing_types(model: Any) -> list[tuple[str, float]]:
    kinds = model.moe_router_load_balancing_type
    coefficients = model.moe_aux_loss_coeff
    if isinstance(kinds, str):
        return [(kinds, coefficients)]
    return list(zip(kinds, coefficients, strict=True))
