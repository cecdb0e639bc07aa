# SPDX-License-Identifier: Apache-2.0
"""The detection of slow GPUs with nvidia-resiliency-ext, in single calls."""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from megatron.bridge.training.callbacks.guard.straggler_detection import NVRxStragglerDetection
from megatron.bridge.training.config import NVRxStragglerDetectionConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils.errors import UserError


class _Progress:
    """The parts of a run that the callback uses."""

    def __init__(self) -> None:
        self.progress = self
        self.step = 0
        self.stop_reason: str | None = None
        self.requeue = False


class NVRxStragglerDetectionManager:
    """Measures the steps of a loop; see ``NVRxStragglerDetectionConfig``."""

    def __init__(self, config: NVRxStragglerDetectionConfig) -> None:
        self.config = config
        self._callback = NVRxStragglerDetection(config)
        self._run = _Progress()
        self.initialized = False

    def initialize(self) -> None:
        """Start the detector; once."""
        if self.initialized:
            raise UserError("the detection of slow GPUs is initialized already: call it once")
        self._callback.on_train_start(cast(Run, self._run))
        self.initialized = True

    def wrap_train_step_function(self, train_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its kernels measured; ``check_stragglers`` follows each call."""

        @wraps(train_step_func)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._callback.on_train_step_start(cast(Run, self._run))
            return train_step_func(*args, **kwargs)

        return measured

    def check_stragglers(self, global_rank: int) -> bool:
        """End a step; print slow GPUs at the interval, and return whether training should stop for them."""
        del global_rank
        self._run.step += 1
        self._callback.on_train_step_end(cast(Run, self._run))
        return self._run.stop_reason is not None

    def shutdown(self) -> None:
        """Stop the detector; safe to call more than once."""
        if self.initialized:
            self._callback.close(cast(Run, self._run))
            self.initialized = False


def check_nvrx_straggler_detection(manager: NVRxStragglerDetectionManager | None) -> bool:
    """Return whether training should stop because of slow GPUs; False without a manager."""
    return manager is not None and manager.check_stragglers(0)


def safe_shutdown_nvrx_straggler_manager(
    manager: NVRxStragglerDetectionManager | None, logger_name: str = "nvrx_straggler"
) -> None:
    """Stop the detector, if there is one."""
    del logger_name
    if manager is not None:
        manager.shutdown()
