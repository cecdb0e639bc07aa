# SPDX-License-Identifier: Apache-2.0
"""Pretraining: train a model from random weights, or resume an earlier run."""

import copy
from collections.abc import Callable
from typing import Any

from megatron.bridge.training.callbacks.base import CallbackManager
from megatron.bridge.training.callbacks.guard.preemption import REQUEUE_EXIT_CODE
from megatron.bridge.training.loop import train
from megatron.bridge.training.resiliency.inprocess_restart import run_with_restarts
from megatron.bridge.training.setup import AnyConfig, Callbacks, resolve_run, setup
from megatron.bridge.training.state import Run


def pretrain(
    config: AnyConfig, forward_step_func: Callable[..., Any], callbacks: Callbacks | None = None
) -> Run:
    """Train the model of ``config``, under any parallelism.

    Args:
        config: The configuration. An unresolved one is resolved into a copy; the original is not modified.
        forward_step_func: For example ``megatron.bridge.training.gpt_step.forward_step``.

    Returns:
        The finished run. Its model chunks hold the trained weights; the process groups still exist.

    Raises:
        UserError: The config, the data or a checkpoint cannot be used.
        SystemExit: A signal or the time limit ended the run. The run is saved; the exit code is
            ``REQUEUE_EXIT_CODE``.
    """
    resolved = resolve_run(config)
    users = CallbackManager(callbacks or ())
    fresh = users.state_dict()

    def attempt() -> Run:
        users.load_state_dict(copy.deepcopy(fresh))
        run = setup(resolved, forward_step_func, users)
        train(run)
        return run

    restart = resolved.config.inprocess_restart
    run = (
        attempt()
        if restart is None or not restart.enabled
        else run_with_restarts(resolved.config, attempt)
    )
    if run.requeue:
        raise SystemExit(run.exit_code or REQUEUE_EXIT_CODE)
    return run
