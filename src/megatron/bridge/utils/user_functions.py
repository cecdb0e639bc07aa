# SPDX-License-Identifier: Apache-2.0
"""Functions that a user names in a config or on the command line, and what is said when one does not fit."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.bridge.utils.errors import UserError, did_you_mean, one_line


@dataclass(frozen=True)
class NamedFunction:
    """A function, and the name that messages and logs give it."""

    name: str
    function: Callable[..., Any]


def load_functions(key: str, entries: Sequence[Any]) -> list[NamedFunction]:
    """Import functions, which runs their code.

    Args:
        key: The setting that names them.
        entries: Functions, or names as ``package.module:function`` or ``path/to/file.py:function``.

    Raises:
        UserError: A name leads to no function, or two have one name.
    """
    functions = [_load_function(key, entry) for entry in entries]
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{key} has two functions called {name}: rename one, or leave one out")
    return functions


def _load_function(key: str, entry: Any) -> NamedFunction:
    if callable(entry):
        return NamedFunction(getattr(entry, "__name__", type(entry).__name__), entry)
    source, separator, name = str(entry).rpartition(":")
    if not isinstance(entry, str) or not separator or not source or not name.isidentifier():
        raise UserError(
            f"{key}: {entry!r} names no function: write package.module:function or "
            "path/to/file.py:function"
        )
    module = (
        _load_file(key, Path(source)) if source.endswith(".py") else _import_module(key, source)
    )
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(
            f"{key}={entry}: {source} has no function {name}{did_you_mean(name, dir(module))}"
        )
    return NamedFunction(name, function)


def _load_file(key: str, path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{key}: {path} is not a file: check the path")
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    assert spec is not None, "a Python file has a loader"
    assert spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of a class
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # it may import its neighbors
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"{key}: {path} fails with {type(error).__name__} when it is imported: {one_line(error)}"
        ) from error
    return module


def _import_module(key: str, name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(
            f"{key}: {name} cannot be imported ({type(error).__name__}: {one_line(error)}): give a "
            "module of the current folder or of an installed package, or a file that ends in .py"
        ) from error


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
