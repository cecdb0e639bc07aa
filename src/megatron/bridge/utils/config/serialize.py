# SPDX-License-Identifier: Apache-2.0
"""Convert dataclasses to plain data and YAML, and back, exactly.

A dataclass becomes a mapping whose ``_target_`` is its public name (``names.PUBLIC_NAMES``) or its dotted name. Named
objects (functions, classes, enum members, torch dtypes) become ``{_target_: name, _call_: false}``; a
``functools.partial`` over an initializer becomes ``{_target_: name, _partial_: {...}}``; tuples and paths become
``{_tuple_: [...]}`` and ``{_path_: ...}``. Reading builds dataclasses with public names and calls nothing else, so
a config file that came with a checkpoint cannot run code.

A dataclass may list fields that are run-time state, not configuration, in a class attribute ``__not_config__`` (a
set of names); these fields are left out.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any, cast

from megatron.bridge.utils.config import interpolation, yaml_text
from megatron.bridge.utils.config.names import (
    MARKERS,
    TARGET,
    importing,
    is_dtype,
    is_named,
    locate,
    name_of,
)
from megatron.bridge.utils.errors import UserError, did_you_mean, refuse
from megatron.bridge.utils.storage_paths import shown

# A partial is called with arguments from the file, so only initializers are allowed.
PARTIAL_HOMES = ("torch.nn.init.",)


def to_plain(value: object) -> Any:
    """Convert ``value`` to plain data for ``from_plain``; an error names every field that cannot be written."""
    problems: list[str] = []
    plain = _write_value(value, "", problems)
    refuse(problems)
    return plain


def from_plain(data: object, trust: bool = False) -> Any:
    """Rebuild the value from the plain data of ``to_plain``.

    With ``trust``, every class and function in the data is imported, which can run code; otherwise only names that
    ``names.locate`` knows are allowed.
    """
    problems: list[str] = []
    with importing(trust):
        value = _read_value(data, "", problems)
    refuse(problems)
    return value


def dump_yaml(value: object) -> str:
    """Return ``value`` as YAML text for ``load_yaml``."""
    return yaml_text.write(to_plain(value))


def load_yaml(text: str, source: str = "the YAML text", trust: bool = False) -> Any:
    """Rebuild the value from YAML; messages call the text ``source``, and ``trust`` is as in ``from_plain``."""
    return from_plain(interpolation.resolve_tree(yaml_text.read(text, source)), trust)


def copy_config(value: Any) -> Any:
    """Copy the blocks and lists of blocks of a config; the copy shares the leaves.

    ``copy.deepcopy`` would also copy the objects that hooks and datasets refer to.
    """
    if isinstance(value, list):
        return [copy_config(item) if is_group(item) else item for item in _as_items(value)]
    if isinstance(value, dict):
        return copy.copy(
            cast(dict[Any, Any], value)
        )  # keeps a subclass, such as a Hugging Face config
    if not is_group(value):
        return value
    copied = copy.copy(value)
    # a hook that is registered on the copy does not change the original
    for name, held in cast(dict[str, Any], vars(copied)).items():
        if isinstance(held, list):
            object.__setattr__(copied, name, list(_as_items(held)))
    for entry in config_fields(copied):
        object.__setattr__(copied, entry.name, copy_config(getattr(copied, entry.name)))
    return copied


def config_fields(owner: object) -> tuple[dataclasses.Field[Any], ...]:
    """Return the configuration fields of a dataclass (or instance): settable, public, not run-time state."""
    return _fields_of(owner if isinstance(owner, type) else type(owner))


@functools.cache
def _fields_of(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    skipped: Iterable[str] = getattr(kind, "__not_config__", ())
    fields = [
        entry for entry in dataclasses.fields(kind) if entry.init and not entry.name.startswith("_")
    ]
    return tuple(entry for entry in fields if entry.name not in skipped)


def is_group(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _write_value(value: Any, path: str, problems: list[str]) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    if (writer := _WRITERS.get(cast(Any, type(value)))) is not None:
        return writer(value, path, problems)
    if isinstance(value, PurePath):
        return {"_path_": interpolation.escape(shown(str(value)))}
    if is_group(value):
        return _write_dataclass(value, path, problems)
    if is_named(value) and (name := name_of(value)) is not None:
        return {TARGET: name, "_call_": False}
    kind = (
        "a function without an importable name"
        if callable(value)
        else f"a {type(value).__qualname__}"
    )
    problems.append(f"{_or_top(path)} cannot be written: it holds {kind}, {value!r}")
    return None


def _write_list(value: Sequence[Any], path: str, problems: list[str]) -> list[Any]:
    return [_write_value(item, f"{path}[{index}]", problems) for index, item in enumerate(value)]


def _write_mapping(value: dict[Any, Any], path: str, problems: list[str]) -> dict[Any, Any]:
    for key in value:
        if type(key) not in (str, int, bool, float) or key in MARKERS:
            problems.append(f"{_or_top(path)} cannot be written: it has the key {key!r}")
    return {key: _write_value(item, _join_path(path, key), problems) for key, item in value.items()}


def _write_partial(value: "functools.partial[Any]", path: str, problems: list[str]) -> Any:
    name = name_of(value.func)
    if name is None or value.args or not name.startswith(PARTIAL_HOMES):
        problems.append(f"{_or_top(path)} cannot be written: it holds {value!r}")
        return None
    return {TARGET: name, "_partial_": _write_mapping(dict(value.keywords), path, problems)}


def _write_dataclass(value: Any, path: str, problems: list[str]) -> dict[str, Any]:
    kind = cast("type[Any]", type(value))
    if (name := name_of(kind)) is None:
        problems.append(
            f"{_or_top(path)} cannot be written: {kind.__qualname__} has no importable name"
        )
        return {}
    problems.extend(phantom_attributes(value, path))
    plain: dict[str, Any] = {TARGET: name}
    for entry in config_fields(value):
        plain[entry.name] = _write_value(
            getattr(value, entry.name), _join_path(path, entry.name), problems
        )
    return plain


def phantom_attributes(value: Any, path: str = "") -> list[str]:
    """Return a sentence for each attribute that a user set on a dataclass instance but that is not a field."""
    fields = {entry.name for entry in dataclasses.fields(value)}
    kind = cast("type[Any]", type(value))
    extra = [
        name
        for name in getattr(value, "__dict__", {})
        if name not in fields and not name.startswith("_") and not hasattr(kind, name)
    ]
    return [
        f"{_join_path(path, name)} is not a field of {kind.__name__}{did_you_mean(name, fields)}"
        for name in extra
        if name not in _own_attributes(kind)
    ]


@functools.cache
def _own_attributes(kind: type[Any]) -> frozenset[str]:
    """Return names that the methods of ``kind`` use: Megatron's ``__post_init__`` sets attributes without a field."""
    methods = (item for base in kind.__mro__ for item in vars(base).values())
    codes = (getattr(method, "__code__", None) for method in methods)
    return frozenset(name for code in codes if code is not None for name in code.co_names)


def _read_value(data: Any, path: str, problems: list[str]) -> Any:
    if isinstance(data, list):
        return [
            _read_value(item, f"{path}[{index}]", problems)
            for index, item in enumerate(_as_items(data))
        ]
    if not isinstance(data, dict):
        return interpolation.unescape(data) if isinstance(data, str) else data
    mapping = cast(dict[Any, Any], data)
    for marker, read in _READERS.items():
        if marker in mapping:
            return read(mapping, path, problems)
    return {
        key: _read_value(item, _join_path(path, key), problems) for key, item in mapping.items()
    }


def _as_items(data: Any) -> list[Any]:
    return cast(list[Any], data)


def _read_target(mapping: dict[Any, Any], path: str, problems: list[str]) -> Any:
    try:
        target = locate(str(mapping[TARGET]))
    except UserError as error:
        problems.append(f"{_or_top(path)}: {error}")
        return None
    if "_call_" in mapping:
        return _read_named(mapping, target, path, problems)
    if "_partial_" in mapping:
        return _read_partial(mapping, target, path, problems)
    if isinstance(target, type) and dataclasses.is_dataclass(target):
        return _read_dataclass(mapping, target, path, problems)
    problems.append(
        f"{_or_top(path)}: {mapping[TARGET]} is not a dataclass and is not called from a config"
    )
    return None


def _read_named(mapping: dict[Any, Any], target: Any, path: str, problems: list[str]) -> Any:
    if mapping["_call_"] is not False or len(mapping) != 2:
        problems.append(
            f"{_or_top(path)}: write the name as {{_target_: {mapping[TARGET]}, _call_: false}}"
        )
    if not is_named(target) and not is_dtype(target):
        problems.append(
            f"{_or_top(path)}: {mapping[TARGET]} is not a function, class, enum member or dtype"
        )
    return target


def _read_partial(mapping: dict[Any, Any], target: Any, path: str, problems: list[str]) -> Any:
    name = str(mapping[TARGET])
    if not name.startswith(PARTIAL_HOMES) or name_of(target) != name:
        problems.append(f"{_or_top(path)}: {name} may not be preset with arguments from a config")
        return None
    return functools.partial(target, **_read_value(mapping["_partial_"], path, problems))


FORMER_NAMES = {("CheckpointConfig", "also_hf"): "also_save_hf_checkpoint"}
"""A class and a field of it, as files of earlier versions name it -> its name today."""


def _read_dataclass(
    mapping: dict[Any, Any], target: type[Any], path: str, problems: list[str]
) -> Any:
    known = [entry.name for entry in config_fields(target)]
    values: dict[str, Any] = {}
    before = len(problems)
    for written_key, item in mapping.items():
        if written_key == TARGET:
            continue
        key = FORMER_NAMES.get((target.__name__, written_key), written_key)
        if key not in known:
            hint = did_you_mean(str(key), known)
            problems.append(f"{_join_path(path, key)} is not a field of {target.__name__}{hint}")
            continue
        values[key] = _read_value(item, _join_path(path, key), problems)
    if len(problems) > before:
        return None
    try:
        return target(**values)
    except (TypeError, ValueError, AssertionError) as error:
        problems.append(f"{_or_top(path)}: {target.__name__} refuses these values: {error}")
        return None


def _join_path(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _or_top(path: str) -> str:
    return path or "the config"


_WRITERS: dict[type, Callable[[Any, str, list[str]], Any]] = {
    str: lambda value, _, __: interpolation.escape(shown(value)),
    list: _write_list,
    tuple: lambda value, path, problems: {"_tuple_": _write_list(value, path, problems)},
    dict: _write_mapping,
    functools.partial: _write_partial,
}
_READERS: dict[str, Callable[[dict[Any, Any], str, list[str]], Any]] = {
    "_tuple_": lambda mapping, path, problems: tuple(
        _as_items(_read_value(mapping["_tuple_"], path, problems))
    ),
    "_path_": lambda mapping, _, __: Path(interpolation.unescape(mapping["_path_"])),
    TARGET: _read_target,
}
