# SPDX-License-Identifier: Apache-2.0
"""Train a model from the start, or go on where the last run stopped."""

import copy
from collections.abc import Callable
from typing import Any

from megatron.bridge.training.callbacks.base import CallbackManager
from megatron.bridge.training.callbacks.preemption import REQUEUE
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.inprocess_restart import restarting
from megatron.bridge.training.loop import train
from megatron.bridge.training.setup import Callbacks, setup
from megatron.bridge.training.state import Run


def pretrain(
    config: ConfigContainer, forward_step_func: Callable[..., Any], callbacks: Callbacks | None = None
) -> Run:
    """Train as ``config`` says, under any parallel layout.

    Args:
        config: What to run.
        forward_step_func: For example ``megatron.bridge.training.gpt_step.forward_step``.
        callbacks: Callbacks of your own.

    Returns:
        The finished run: its model chunks hold the trained weights, and the process groups are still up.

    Raises:
        UserError: something in the config, the data or a checkpoint cannot be used.
        SystemExit: with ``REQUEUE``, after a signal or when the time was over; everything is saved.
    """
    users = CallbackManager(callbacks or ())
    fresh = users.state_dict()

    def attempt() -> Run:
        users.load_state_dict(copy.deepcopy(fresh))
        run = setup(config, forward_step_func, users)
        train(run)
        return run

    restart = config.inprocess_restart
    run = attempt() if restart is None or not restart.enabled else restarting(config, attempt)
    if run.requeue:
        raise SystemExit(REQUEUE)
    return run
