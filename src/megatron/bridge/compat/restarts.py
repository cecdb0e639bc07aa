# SPDX-License-Identifier: Apache-2.0
"""Restarts within processes, for programs with loops of their own: refused."""

from collections.abc import Callable
from typing import Any, NoReturn

from megatron.bridge.utils.errors import UserError


def inprocess_restart(train_fn: Callable[..., Any], config: Any, global_state: Any) -> NoReturn:
    """Refuse to wrap a function that this package did not set up, and could not release after a failure."""
    raise UserError(
        "inprocess_restart: only pretrain, finetune and their relatives can set up a run again in the same processes; "
        "call them with config.inprocess_restart, or leave restarts to the launcher"
    )


def maybe_wrap_for_inprocess_restart(
    train_fn: Callable[..., Any], config: Any, state: Any
) -> tuple[Callable[..., Any], None]:
    """Return ``train_fn`` and no store, unless ``config.enabled``, which is refused."""
    if config is not None and config.enabled:
        inprocess_restart(train_fn, config, state)
    return train_fn, None
