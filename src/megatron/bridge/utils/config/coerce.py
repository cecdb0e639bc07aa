# SPDX-License-Identifier: Apache-2.0
"""Convert a value from a user to the annotation of a dataclass field, or refuse it with the reason."""

import collections.abc
import dataclasses
import enum
import functools
import sys
import types
import typing
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

from megatron.bridge.utils.config.names import is_dtype, locate
from megatron.bridge.utils.config.serialize import TARGET, from_plain
from megatron.bridge.utils.errors import UserError, did_you_mean

TRUE_WORDS = frozenset({"true", "yes", "on"})
FALSE_WORDS = frozenset({"false", "no", "off"})
DTYPE_NAMES = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}

FUNCTION_MODULES = ("torch.nn.functional", "torch.nn.init", "megatron.core.activations", "torch")
"""Modules with the functions of bare names such as ``silu``."""


class CoercionError(UserError):
    """A value that does not match the type of its field."""

    def __init__(self, expected: str, value: Any, hint: str = "") -> None:
        super().__init__(f"must be {expected}, not {value!r}{hint}")
        self.wanted = expected
        self.hint = hint
        """A phrase with the nearest choices, or an empty string."""


@functools.cache
def field_types(kind: type[Any]) -> dict[str, Any]:
    """Return the resolved annotations of a dataclass, with ``Any`` for those that cannot be resolved."""
    try:
        return typing.get_type_hints(kind)
    except (NameError, AttributeError, TypeError):
        return {
            entry.name: _resolve_annotation(kind, entry.name) for entry in dataclasses.fields(kind)
        }


def _resolve_annotation(kind: type[Any], name: str) -> Any:
    owner = next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", {}))
    annotation = owner.__annotations__[name]
    if get_origin(annotation) is typing.Annotated:
        return get_args(annotation)[0]
    if not isinstance(annotation, str):
        return annotation
    try:
        # source text of this package, as in typing.get_type_hints
        return eval(annotation, vars(sys.modules[owner.__module__]))
    except Exception:
        return Any


def coerce(value: Any, annotation: Any, text: str | None = None) -> Any:
    """Convert ``value`` to the type ``annotation``.

    Example:
        >>> coerce(1, float), coerce([1, 2], tuple[int, ...]), coerce(7, str, "007")
        (1.0, (1, 2), '007')

    ``text`` is the raw text of a scalar: a field of type str keeps it as it is (``001``).

    Raises:
        CoercionError: the value has the wrong type; the message is a phrase that starts with "must be".
        UserError: the value has the right type, but contains a mistake.
    """
    if annotation is Any or annotation is object or isinstance(annotation, typing.TypeVar):
        return value
    origin = get_origin(annotation)  # includes a bare typing.Callable
    if origin in (Union, types.UnionType):
        return _coerce_union(value, get_args(annotation), text)
    if origin is Literal:
        return _coerce_choice(value, get_args(annotation), text)
    if origin is typing.Annotated:
        return coerce(value, get_args(annotation)[0], text)
    converter = _CONVERTERS.get(origin or annotation)
    if converter is not None:
        return converter(value, get_args(annotation), text)
    return _coerce_class(value, annotation)


def _refuse_value(expected: str, value: Any, hint: str = "") -> typing.NoReturn:
    raise CoercionError(expected, value, hint)


def _coerce_none(value: Any, args: Sequence[Any], text: str | None) -> Any:
    return None if value is None else _refuse_value("null", value)


def _coerce_bool(value: Any, args: Sequence[Any], text: str | None) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in TRUE_WORDS | FALSE_WORDS:
        return value.lower() in TRUE_WORDS
    return _refuse_value("true or false", value)


def _coerce_int(value: Any, args: Sequence[Any], text: str | None) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # a million is often written as 1e6
    return value if type(value) is int else _refuse_value("an integer", value)


def _coerce_str(value: Any, args: Sequence[Any], text: str | None) -> Any:
    if isinstance(value, str):
        return value
    return (
        text
        if text is not None and type(value) in (bool, int, float)
        else _refuse_value("a string", value)
    )


def _coerce_list(value: Any, args: Sequence[Any], text: str | None) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        _refuse_value("a list, written as [a,b]", value)
    return [coerce(item, args[0] if args else Any) for item in cast(list[Any], value)]


def _coerce_tuple(value: Any, args: Sequence[Any], text: str | None) -> Any:
    items = _coerce_list(value, (), text)
    kinds = (
        [args[0]] * len(items)
        if len(args) == 2 and args[1] is Ellipsis
        else (args or [Any] * len(items))
    )
    if len(items) != len(kinds):
        _refuse_value(f"a list of {len(kinds)}", value)
    return tuple(coerce(item, kind) for item, kind in zip(items, kinds, strict=True))


def _coerce_dict(value: Any, args: Sequence[Any], text: str | None) -> Any:
    if not isinstance(value, dict):
        _refuse_value("a mapping, written as {a: 1}", value)
    key_kind, item_kind = args if len(args) == 2 else (Any, Any)
    mapping = cast(dict[Any, Any], value)
    return {
        coerce(key, key_kind): _coerce_item(key, item, item_kind) for key, item in mapping.items()
    }


def _coerce_item(key: Any, item: Any, kind: Any) -> Any:
    """Convert an item of a mapping; an error names its key."""
    try:
        return coerce(item, kind)
    except CoercionError as error:
        hint = error.hint
        if item is None and isinstance(key, str) and ":" in key:
            name, _, number = key.partition(":")
            hint = f": YAML needs a space after a colon, write {{{name}: {number}}}"
        raise CoercionError(f"{error.wanted} for {key!r}", item, hint) from None


def _coerce_callable(value: Any, args: Sequence[Any], text: str | None) -> Any:
    if not isinstance(value, str):
        return value if callable(value) else _refuse_value("the name of a function", value)
    if "." not in value:
        modules = [
            module
            for module in map(import_module, FUNCTION_MODULES)
            if callable(getattr(module, value, None))
        ]
        if not modules:
            known = [
                name
                for module in FUNCTION_MODULES[:2]
                for name in dir(import_module(module))
                if name[0] != "_"
            ]
            _refuse_value("the name of a function", value, did_you_mean(value, known))
        return getattr(modules[0], value)
    located = locate(value)
    return located if callable(located) else _refuse_value("the name of a function", value)


def _coerce_union(value: Any, members: Sequence[Any], text: str | None) -> Any:
    exact = [member for member in members if isinstance(member, type) and type(value) is member]
    if exact:
        return value
    if value is None and type(None) in members:
        return None
    misfits: list[CoercionError] = []
    # a string field would accept any input, so it is tried last
    for member in sorted(members, key=lambda member: member is str):
        try:
            return coerce(value, member, text)
        except CoercionError as error:
            misfits += [error] if member is not type(None) else []
    expected = [error.wanted for error in misfits] + ["null"] * (type(None) in members)
    return _refuse_value(" or ".join(expected), value, "".join(error.hint for error in misfits))


def _coerce_choice(value: Any, choices: Sequence[Any], text: str | None) -> Any:
    for choice in choices:
        if (type(choice) is type(value) and choice == value) or (
            isinstance(choice, str) and choice == text
        ):
            return choice
    names = [str(choice) for choice in choices]
    return _refuse_value(f"one of {', '.join(names)}", value)


def _coerce_class(value: Any, annotation: Any) -> Any:
    if not isinstance(annotation, type):
        return value  # an annotation that cannot be checked
    kind = cast("type[Any]", annotation)
    if isinstance(value, kind):
        return value
    if issubclass(kind, enum.Enum):
        return _coerce_enum(value, kind)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return _coerce_dtype(value)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        members = cast(dict[Any, Any], value)
        annotations = field_types(kind)
        typed = {
            name: _coerce_member(name, item, annotations.get(name, Any))
            for name, item in members.items()
        }
        return from_plain({TARGET: f"{kind.__module__}.{kind.__qualname__}", **typed}, trust=True)
    return _refuse_value(f"a {kind.__name__}", value)


def _coerce_member(name: str, value: Any, annotation: Any) -> Any:
    try:
        return coerce(value, annotation)
    except CoercionError as error:
        raise UserError(f"{name} {error}") from None


def _coerce_enum(value: Any, kind: type[enum.Enum]) -> Any:
    for member in kind:
        if value in (member.name, member.value):
            return member
    return _refuse_value(f"one of {', '.join(member.name for member in kind)}", value)


def _coerce_dtype(value: Any) -> Any:
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        dtype = getattr(import_module("torch"), DTYPE_NAMES.get(name, name), None)
        if is_dtype(dtype):
            return dtype
    return _refuse_value("a torch dtype such as bfloat16", value)


_CONVERTERS: dict[Any, Callable[[Any, Sequence[Any], str | None], Any]] = {
    type(None): _coerce_none,
    None: _coerce_none,
    bool: _coerce_bool,
    int: _coerce_int,
    float: lambda value, args, text: (
        float(value) if type(value) in (int, float) else _refuse_value("a number", value)
    ),
    str: _coerce_str,
    Path: lambda value, args, text: (
        value if isinstance(value, Path) else Path(_coerce_str(value, args, text))
    ),
    list: _coerce_list,
    tuple: _coerce_tuple,
    dict: _coerce_dict,
    cast(Any, collections.abc.Callable): _coerce_callable,
}
