# SPDX-License-Identifier: Apache-2.0
"""What the loss function of a forward step returns, brought to one form before Megatron-Core reads it."""

from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch

from megatron.bridge.training.state import ForwardStep
from megatron.bridge.utils.errors import UserError

WITH_TOKENS = "(loss, num_tokens, report)"
FORMS = f"(loss, report) or {WITH_TOKENS}"


def checked(step: ForwardStep, per_token: bool) -> ForwardStep:
    """``step`` with a check of its loss function; ``per_token`` is the model's ``calculate_per_token_loss``.

    It raises a ``UserError`` for a loss or a report of a wrong form. In the reports that it returns, each value is
    a tensor with one element, or with two: a sum and a count.
    """

    def call(*inputs: Any, **options: Any) -> Any:
        found = step(*inputs, **options)
        if not (isinstance(found, tuple) and len(found) == 2 and (callable(found[1]) or found[1] is None)):
            raise UserError(f"the forward step returned {_form(found)}: return the output and a loss function")
        output, function = found
        return output, None if function is None else lambda tensor, **more: _checked(
            function(tensor, **more), per_token
        )

    return call


def _checked(found: Any, per_token: bool) -> tuple[Any, ...]:
    if not isinstance(found, tuple | list) or len(found) not in (2, 3):
        _refuse(f"returned {_form(found)}: return {FORMS}")
    loss, *tokens, report = found
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        _refuse(f"returned {_form(loss)} as the loss: return a tensor with one element")
    if per_token and not tokens:
        _refuse("returned no num_tokens, which model.calculate_per_token_loss=True needs: return " + WITH_TOKENS)
    if not isinstance(report, Mapping):
        _refuse(f"returned {_form(report)} as the report: return a dict of numbers by name")
    named = cast("Mapping[str, Any]", report)
    device = loss.device  # numbers are made where they are added to other microbatches
    values = {name: _value(name, value, device) for name, value in named.items()}
    return loss, *(_count(number, device) for number in tokens), values


def _count(tokens: Any, device: torch.device) -> torch.Tensor:
    count = torch.as_tensor(tokens, device=device)
    if count.numel() != 1 or count.is_floating_point():
        _refuse(f"returned {_form(tokens)} as num_tokens: return one whole number")
    return count


def _value(name: str, value: Any, device: torch.device) -> torch.Tensor:
    parts = cast("list[Any]", value) if isinstance(value, tuple | list) else [value]
    number = torch.cat([torch.as_tensor(part, device=device).detach().double().flatten() for part in parts])
    if number.numel() not in (1, 2):
        _refuse(f"reported {name} as {_form(value)}: report one number, or a sum and a count")
    return number


def _form(value: Any) -> str:
    """What a wrong value is, in words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(cast('list[Any]', value))} values"
    return f"a {type(value).__name__}"


def _refuse(problem: str) -> NoReturn:
    raise UserError(f"the loss function {problem}")
