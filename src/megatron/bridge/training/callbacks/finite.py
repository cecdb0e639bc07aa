# SPDX-License-Identifier: Apache-2.0
"""A run that went wrong ends before it is saved."""

import math

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.state import Run


class FiniteGradients(Callback):
    """Ends the run at a step whose gradient norm is not finite: its update has ruined the weights.

    The norm is read on the host anyway, and is the same on all ranks, so the check is free and all stop together.
    With fp16 such steps are skipped, not applied, and the run goes on at a lower loss scale.
    """

    def on_train_step_end(self, context: Run) -> None:
        """Look at the norm."""
        if context.skipped_iter or context.grad_norm is None or math.isfinite(context.grad_norm):
            return
        losses = ", ".join(f"{name} {loss.item()}" for name, loss in (context.loss_dict or {}).items())
        raise FloatingPointError(
            f"step {context.progress.step}: the gradient norm is {context.grad_norm} ({losses}); it is not saved. "
            "Resume from the last checkpoint with a lower optimizer.lr, or look for broken samples"
        )
