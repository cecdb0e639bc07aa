# SPDX-License-Identifier: Apache-2.0
"""Adapt a forward step of any supported signature, and what its loss function returns, to Megatron-Core's schedules."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, cast

import torch

from megatron.bridge.training.state import ForwardStep, Run
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.user_functions import positional_parameters

SIGNATURES = "(data_iterator, model) or (state, data_iterator, model), each with an optional return_schedule_plan=False"
STATE_NAMES = ("state", "global_state", "run", "context")
STATE_HINTS = ("GlobalState", "Run", "CallbackContext")
SCHEDULE_PLAN = "return_schedule_plan"


def takes_state(step: Callable[..., Any]) -> bool:
    """Whether ``step`` takes the state of the run before the data iterator and the model.

    Raises:
        UserError: The signature is not supported.
    """
    parameters = positional_parameters("forward_step", step, SIGNATURES)
    required = [
        entry
        for entry in parameters
        if entry.default is entry.empty and entry.name != SCHEDULE_PLAN
    ]
    named = [_is_state(entry) for entry in required]
    if len(required) == 2 and not any(named):
        return False
    # the first of three parameters is the state, whatever its name, unless another one is the state
    if len(required) == 3 and not any(named[1:]):
        return True
    names = ", ".join(entry.name for entry in required)
    name = getattr(step, "__name__", type(step).__name__)
    raise UserError(
        f"the forward step {name}({names}) has an unsupported signature: write it as {SIGNATURES}"
    )


def returns_schedule_plan(step: Callable[..., Any]) -> bool:
    """Whether ``step`` can return a schedule plan instead of an output."""
    return SCHEDULE_PLAN in inspect.signature(step).parameters


def bind_state(step: Callable[..., Any], run: Run) -> ForwardStep:
    """``step`` with the signature ``(data_iterator, model)``; the run is bound if ``step`` takes the state."""
    return partial(step, run) if takes_state(step) else step


def _is_state(entry: inspect.Parameter) -> bool:
    if entry.annotation is not entry.empty:
        hint = entry.annotation if isinstance(entry.annotation, str) else entry.annotation.__name__
        return hint.rpartition(".")[2] in STATE_HINTS
    return entry.name in STATE_NAMES


WITH_TOKENS = "(loss, num_tokens, report)"
FORMS = f"(loss, report) or {WITH_TOKENS}"


def checked(
    step: ForwardStep, per_token: bool, returned: list[torch.Tensor] | None = None
) -> ForwardStep:
    """``step`` with a check of its loss function; ``per_token`` is the model's ``calculate_per_token_loss``.

    Each ``num_tokens`` is added to the list ``returned``. The step raises a ``UserError`` for a loss or a report of a
    wrong form. In the reports that it returns, each value is a tensor with one element, or with two: a sum and a count.
    """

    def call(*inputs: Any, **options: Any) -> Any:
        result = step(*inputs, **options)
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and (callable(result[1]) or result[1] is None)
        ):
            raise UserError(
                f"the forward step returned {_form(result)}: return the output and a loss function"
            )
        output, function = result
        if function is None:
            return output, None

        def loss_function(tensor: torch.Tensor, **more: Any) -> tuple[Any, ...]:
            parts = _checked(function(tensor, **more), per_token)
            _, *tokens, _ = parts
            if returned is not None:
                returned.extend(tokens)
            return parts

        return output, loss_function

    return call


def _checked(result: Any, per_token: bool) -> tuple[Any, ...]:
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        _refuse(f"returned {_form(result)}: return {FORMS}")
    loss, *tokens, report = result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        _refuse(f"returned {_form(loss)} as the loss: return a tensor with one element")
    if per_token and not tokens:
        _refuse(
            "returned no num_tokens, which model.calculate_per_token_loss=True needs: return "
            + WITH_TOKENS
        )
    if not isinstance(report, Mapping):
        _refuse(f"returned {_form(report)} as the report: return a dict of numbers by name")
    named = cast("Mapping[str, Any]", report)
    device = loss.device  # numbers are made where they are added to other microbatches
    values = {name: _value(name, value, device) for name, value in named.items()}
    return loss, *(_count(token_count, device) for token_count in tokens), values


def _count(tokens: Any, device: torch.device) -> torch.Tensor:
    count = torch.as_tensor(tokens, device=device)
    if count.numel() != 1 or count.is_floating_point():
        _refuse(f"returned {_form(tokens)} as num_tokens: return one whole number")
    return count


def _value(name: str, value: Any, device: torch.device) -> torch.Tensor:
    parts = cast("list[Any]", value) if isinstance(value, tuple | list) else [value]
    joined = torch.cat(
        [torch.as_tensor(part, device=device).detach().double().flatten() for part in parts]
    )
    if joined.numel() not in (1, 2):
        _refuse(f"reported {name} as {_form(value)}: report one number, or a sum and a count")
    return joined


def _form(value: Any) -> str:
    """What a wrong value is, in words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(cast('list[Any]', value))} values"
    return f"a {type(value).__name__}"


def _refuse(problem: str) -> NoReturn:
    raise UserError(f"the loss function {problem}")
