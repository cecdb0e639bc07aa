# SPDX-License-Identifier: Apache-2.0
"""Evaluation on held-out data."""

from dataclasses import dataclass


@dataclass
class ValidationConfig:
    """Evaluation on held-out data."""

    eval_interval: int | None = None
    """Steps between evaluations; None evaluates once, at the end."""
    eval_iters: int = 0
    """Global batches in one evaluation; 0 switches evaluation off."""
