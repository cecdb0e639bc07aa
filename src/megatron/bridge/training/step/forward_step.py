# SPDX-License-Identifier: Apache-2.0
"""Adapt a forward step of any supported signature to the signature that Megatron-Core's schedules call."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.bridge.training.state import ForwardStep, Run
from megatron.bridge.utils.errors import UserError

FORMS = "(data_iterator, model) or (state, data_iterator, model), each with an optional return_schedule_plan=False"
STATE_NAMES = ("state", "global_state", "run", "context")
STATE_HINTS = ("GlobalState", "Run", "CallbackContext")
SCHEDULE_PLAN = "return_schedule_plan"


def takes_state(step: Callable[..., Any]) -> bool:
    """Whether ``step`` takes the state of the run before the data iterator and the model.

    Raises:
        UserError: The signature is not supported.
    """
    required = [entry for entry in _positional(step) if entry.default is entry.empty]
    named = [_is_state(entry) for entry in required]
    if len(required) == 2 and not any(named):
        return False
    # the first of three parameters is the state, whatever its name, unless another one is the state
    if len(required) == 3 and not any(named[1:]):
        return True
    names = ", ".join(entry.name for entry in required)
    name = getattr(step, "__name__", type(step).__name__)
    raise UserError(f"the forward step {name}({names}) has an unsupported signature: write it as {FORMS}")


def returns_schedule_plan(step: Callable[..., Any]) -> bool:
    """Whether ``step`` can return a schedule plan instead of an output."""
    return SCHEDULE_PLAN in inspect.signature(step).parameters


def bind_state(step: Callable[..., Any], run: Run) -> ForwardStep:
    """``step`` with the signature ``(data_iterator, model)``; the run is bound if ``step`` takes the state."""
    return partial(step, run) if takes_state(step) else step


def _positional(step: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        entry
        for entry in inspect.signature(step).parameters.values()
        if entry.kind in kinds and entry.name != SCHEDULE_PLAN
    ]


def _is_state(entry: inspect.Parameter) -> bool:
    if entry.annotation is not entry.empty:
        hint = entry.annotation if isinstance(entry.annotation, str) else entry.annotation.__name__
        return hint.rpartition(".")[2] in STATE_HINTS
    return entry.name in STATE_NAMES
