# SPDX-License-Identifier: Apache-2.0
"""Whole weights at the end of a run."""

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.param_gather import gather_params
from megatron.bridge.training.state import Run


class GatherParams(Callback):
    """Completes an overlapped parameter gather after the last step, for whoever uses the model next."""

    def on_train_end(self, context: Run) -> None:
        """Gather."""
        gather_params(context.model)
