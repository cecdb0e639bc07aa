# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Losses that a forward step does not see: of further tokens, and of the routers of experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron.bridge.backends import further_tokens
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.losses import Report

_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


@contextmanager
def collected() -> Iterator[Report]:
    """Sum and number of the losses of further tokens; what routers compute within is kept for `router_losses`."""
    get_moe_metrics_tracker().clear()  # a step may be repeated
    with further_tokens.collected() as totals:
        yield totals


def share_out(totals: Report, reports: list[Report]) -> list[Report]:
    """The reports of the microbatches, each with an equal part of ``totals``: only their sum is used."""
    return [report | {name: total / len(reports) for name, total in totals.items()} for report in reports]


def router_losses(config: ConfigContainer, microbatches: int) -> Report:
    """Mean losses of the step's routers, over layers, microbatches and replicas; equal on all ranks.

    The coefficients are not multiplied in: a balance that is perfect has the load-balancing loss 1. Megatron-Core
    reduces over groups that a rank learns of from its own routers, and a pipeline stage without experts has none.

    Args:
        config: The resolved config.
        microbatches: Number of microbatches of a rank in the step.
    """
    parts = _parts(config.model)
    if not parts:
        return {}
    recorded = get_moe_metrics_tracker().metrics
    layers = config.model.num_layers + (config.model.mtp_num_layers or 0)
    device = torch.cuda.current_device()
    table = torch.zeros(len(parts), layers, dtype=torch.float64, device=device)
    for row, name in enumerate(parts):
        if name in recorded:
            table[row] += recorded[name].values[:layers]
    dist.all_reduce(table)
    # a layer without a router adds nothing, and no router's loss is zero
    means = table.sum(1) / (table != 0).sum(1).clamp(min=1) / microbatches
    return {name: mean / part for mean, (name, part) in zip(means, parts.items(), strict=True)}


def _parts(model: Any) -> dict[str, int]:
    """For each loss that routers compute: over how many ranks it is a mean; over the others it is a sum."""
    if not model.num_moe_experts:
        return {}
    replicas = parallel_state.get_data_parallel_world_size()
    parts = {
        _BALANCING[kind]: 1 if kind == "global_aux_loss" else replicas
        for kind, coefficient in _kinds(model)
        if kind in _BALANCING and coefficient
    }
    if model.moe_z_loss_coeff is not None:
        group: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        parts["z_loss"] = group.size()
    return parts


def _kinds(model: Any) -> list[tuple[str, float]]:
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if isinstance(kinds, str):
        return [(kinds, coefficients)]
    return list(zip(kinds, coefficients, strict=True))
