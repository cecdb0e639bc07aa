# SPDX-License-Identifier: Apache-2.0
"""Let models of different depth report the metrics of routers and of multi-token prediction in one process.

Megatron-Core keeps one tracker of each per process, sized by the first model that records anything: a later model
with more layers (a student after its teacher, the next test) gets an IndexError in its forward pass.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


class GrowingMoEMetrics(MoEMetricsTracker):
    """Megatron-Core's tracker, whose per-layer values grow with the deepest model."""

    def record(self, name: str, value: torch.Tensor, layer_number: int, num_layers: int, **groups: Any) -> None:
        """Add a layer's value, as the base class does."""
        self._grow(name, num_layers)
        super().record(name, value, layer_number, num_layers, **groups)

    def ensure_initialized(self, name: str, num_layers: int, device: Any = None) -> None:
        """Create a metric on a rank that has no expert layers, as the base class does."""
        self._grow(name, num_layers)
        super().ensure_initialized(name, num_layers, device)

    def _grow(self, name: str, num_layers: int) -> None:
        entry = self._metrics.get(name)
        if entry is not None and entry.values.numel() < num_layers:
            missing = entry.values.new_zeros(num_layers - entry.values.numel())
            entry.values = torch.cat((entry.values, missing))


def allow_deeper_models() -> None:
    """Put the growing tracker in the place of Megatron-Core's, once; what it recorded is kept."""
    current = get_moe_metrics_tracker()
    if not isinstance(current, GrowingMoEMetrics):
        growing = GrowingMoEMetrics()
        growing._metrics = current._metrics
        set_moe_metrics_tracker(growing)


def allow_deeper_predictions(depths: int) -> None:
    """Make room for ``depths`` layers of multi-token prediction; what was recorded is kept."""
    tracker = MTPLossLoggingHelper.tracker
    for name in ("loss_values", "correct_values", "total_values"):
        values = tracker.get(name)
        if values is not None and values.numel() < depths:
            tracker[name] = torch.cat((values, values.new_zeros(depths - values.numel())))
