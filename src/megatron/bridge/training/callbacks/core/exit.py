# SPDX-License-Identifier: Apache-2.0
"""The end of a run: before its last step, and with complete weights."""

from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import TrainingConfig
from megatron.bridge.training.optim.param_gather import gather_params
from megatron.bridge.training.state import Run


class ExitInterval(Callback):
    """Ends the run after a step whose number is a multiple of ``train.exit_interval``."""

    def __init__(self, train: TrainingConfig) -> None:
        self._interval = train.exit_interval

    def on_train_step_end(self, context: Run) -> None:
        if context.is_due(self._interval):
            context.stop_reason = f"train.exit_interval={self._interval}"


class ParamGather(Callback):
    """Completes an overlapped parameter gather after the last step, so that the model can be used afterwards."""

    def on_train_end(self, context: Run) -> None:
        gather_params(context.model)
