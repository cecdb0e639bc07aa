# SPDX-License-Identifier: Apache-2.0
"""Complete weights at the end of a run."""

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.optim.param_gather import gather_params
from megatron.bridge.training.state import Run


class ParamGather(Callback):
    """Completes an overlapped parameter gather after the last step, so that the model can be used afterwards."""

    def on_train_end(self, context: Run) -> None:
        gather_params(context.model)
