# SPDX-License-Identifier: Apache-2.0
"""Functions that a user names in a config or on the command line, and what is said when one does not fit."""

import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from megatron.bridge.utils.errors import UserError, one_line


def function_name(function: Any) -> str:
    """Return the dotted name of a function, or its text if it has none."""
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else repr(function)


def positional_parameters(key: str, function: Any, usage: str) -> list[inspect.Parameter]:
    """Return the parameters of a function that can be given by position.

    Args:
        key: The setting that names the function.
        function: What it names.
        usage: How such a function is written, for the message.

    Raises:
        UserError: It is no function with a Python signature.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key}={function_name(function)} is no function of Python with known parameters: write it as {usage}"
        ) from error
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.kind in by_position]


def check_call(key: str, function: Callable[..., Any], arguments: int, usage: str) -> None:
    """Refuse a function that cannot be called with a number of arguments by position.

    Args:
        key: The setting that names the function.
        function: What it names; it has a Python signature.
        arguments: How many arguments it will get.
        usage: How such a function is written, for the message.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise UserError(
            f"{key}={function_name(function)} has the parameters ({names}): write it as {usage}"
        ) from error


def failure_of(key: str, function: Any, error: Exception, where: str = "") -> UserError:
    """Return one sentence about an error that a user's function has raised, with the line that raised it.

    Args:
        key: The setting that names the function.
        function: What it names.
        error: What it has raised.
        where: The file and line of the record that it was given.
    """
    last = _last_frame(traceback.extract_tb(error.__traceback__))
    start = f"{where}: " if where else ""
    place = f" at {last.filename}:{last.lineno}" if last else ""
    return UserError(
        f"{start}{key}={function_name(function)} fails with {type(error).__name__}: {one_line(error)}{place}: "
        "correct the function, or name another one"
    )


def _last_frame(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the frame that raised; None if it is the caller of the function, which then has no Python code."""
    inner = list(frames)[1:]
    return inner[-1] if inner else None
