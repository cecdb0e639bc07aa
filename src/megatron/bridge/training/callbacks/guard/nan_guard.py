# SPDX-License-Identifier: Apache-2.0
"""End a run whose gradient norm is not finite."""

import math

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.state import Run


class NaNGuard(Callback):
    """Ends the run at a step whose gradient norm is not finite: the update of this step has corrupted the weights.

    The norm is already on the host and equal on all ranks, so the check is free and all ranks stop together. With
    fp16 the optimizer skips such steps and the run continues with a lower loss scale.
    """

    def on_train_step_end(self, context: Run) -> None:
        if context.skipped_iter or context.grad_norm is None or math.isfinite(context.grad_norm):
            return
        losses = ", ".join(
            f"{name} {loss.item()}" for name, loss in (context.loss_dict or {}).items()
        )
        raise FloatingPointError(
            f"step {context.progress.step}: the gradient norm is {context.grad_norm} ({losses}); the step is not "
            "saved. Resume from the last checkpoint with a lower optimizer.lr, or look for corrupt samples"
        )
