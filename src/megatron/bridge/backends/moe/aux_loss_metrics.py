# SPDX-License-Identifier: Apache-2.0
"""Metrics of routers and of multi-token prediction for several models of different depth in one process.

Megatron-Core has one tracker of each per process, sized by the first model that records a value: a later model
with more layers (a student after its teacher, or the next test) raises an IndexError in its forward pass.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.bridge.backends.moe.router_losses import install_router_losses


class GrowingMoEMetricsTracker(MoEMetricsTracker):
    """Megatron-Core's tracker with per-layer values that grow with the deepest model.

    Megatron-Core averages the means of microbatches and ranks. ``weighted`` has sums over tokens, and the tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weighted: dict[str, torch.Tensor] = {}
        """For each loss, the sum over tokens and the number of tokens of each layer, [2, layers]."""

    def record_weighted(
        self, name: str, total: torch.Tensor, tokens: torch.Tensor, layer_number: int, layers: int
    ) -> None:
        """Add the sum ``total`` of a loss over ``tokens`` tokens in one of ``layers`` layers."""
        pair = torch.stack((total.detach().double(), tokens.double()))
        table = self.weighted.get(name)
        if table is None or table.device != pair.device:
            table = pair.new_zeros(2, layers)
        if table.size(1) < layers:
            table = torch.cat((table, table.new_zeros(2, layers - table.size(1))), dim=1)
        table[:, layer_number - 1] += pair
        self.weighted[name] = table

    def clear(self) -> None:
        super().clear()
        for table in self.weighted.values():
            table.zero_()  # in place: a CUDA graph adds to it

    def record(
        self, name: str, value: torch.Tensor, layer_number: int, num_layers: int, **groups: Any
    ) -> None:
        entry = self._metrics.get(name)
        if (
            entry is not None and entry.values.device != value.device
        ):  # of a model on the meta device
            del self._metrics[name]
        self._grow(name, num_layers)
        super().record(name, value, layer_number, num_layers, **groups)

    def ensure_initialized(self, name: str, num_layers: int, device: Any = None) -> None:
        self._grow(name, num_layers)
        super().ensure_initialized(name, num_layers, device)

    def _grow(self, name: str, num_layers: int) -> None:
        entry = self._metrics.get(name)
        if entry is not None and entry.values.numel() < num_layers:
            missing = entry.values.new_zeros(num_layers - entry.values.numel())
            entry.values = torch.cat((entry.values, missing))


def _combine_outputs(layer: Any, output: torch.Tensor) -> torch.Tensor:
    """Combine experts' outputs and drop the router's weights, whose graph would outlive full recomputation."""
    vars(layer.token_dispatcher).pop("probs", None)
    return layer.token_dispatcher.token_combine(output)


def install_growing_tracker() -> None:
    """Replace Megatron-Core's tracker by a growing one that keeps its values, router losses and ``combine``.

    It is safe to call again.
    """
    install_router_losses()
    MoELayer.combine = _combine_outputs  # pyright: ignore[reportAttributeAccessIssue]
    current = get_moe_metrics_tracker()
    if not isinstance(current, GrowingMoEMetricsTracker):
        growing = GrowingMoEMetricsTracker()
        growing._metrics = current._metrics
        set_moe_metrics_tracker(growing)


def grow_mtp_metrics(depths: int) -> None:
    """Make room for ``depths`` layers of multi-token prediction, keeping recorded values."""
    tracker = MTPLossLoggingHelper.tracker
    for name in ("loss_values", "correct_values", "total_values"):
        values = tracker.get(name)
        if values is not None and values.numel() < depths:
            tracker[name] = torch.cat((values, values.new_zeros(depths - values.numel())))
