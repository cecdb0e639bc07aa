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


class GrowingMoEMetricsTracker(MoEMetricsTracker):
    """Megatron-Core's tracker with per-layer values that grow with the deepest model."""

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


def _combine(layer: Any, output: torch.Tensor) -> torch.Tensor:
    """Combine experts' outputs and drop the router's weights, whose graph would outlive full recomputation."""
    vars(layer.token_dispatcher).pop("probs", None)
    return layer.token_dispatcher.token_combine(output)


def install_growing_tracker() -> None:
    """Replace Megatron-Core's tracker by a growing one that keeps its values, and ``combine``; safe to call again."""
    MoELayer.combine = _combine  # pyright: ignore[reportAttributeAccessIssue]
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
