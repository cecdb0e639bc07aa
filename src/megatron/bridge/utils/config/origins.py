# SPDX-License-Identifier: Apache-2.0
"""Where each value of a config came from: default, recipe, file, command line, or derived from other values."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, cast

from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.names import is_named, name_of
from megatron.bridge.utils.config.overrides import Change
from megatron.bridge.utils.config.serialize import TARGET, config_fields, to_plain

DEFAULT = "default"
DERIVED = "derived"

_ATTRIBUTE = "_origins"  # on the config itself: private, so no field, no YAML key and no override


def start(config: Any, source: str = "recipe") -> None:
    """Begin to keep origins: a value that differs from its field's default came from ``source``."""
    found = {key: source if differs else DEFAULT for key, differs in _differing(config)}
    object.__setattr__(config, _ATTRIBUTE, found)


def ensure(config: Any, source: str) -> None:
    """Begin to keep origins as ``start`` does, unless they are kept."""
    if not _table(config):
        start(config, source)


def record(config: Any, changes: Iterable[Change]) -> None:
    """Note who set the values of ``changes``."""
    found = _table(config)
    leaves = values(config)
    for change in changes:
        key = change.key
        members = [leaf for leaf in leaves if leaf.startswith(f"{key}.")]  # a group was given as a whole
        while key not in leaves and not members and "." in key:  # a member of a mapping counts for the mapping
            key = key.rpartition(".")[0]
        found.update(dict.fromkeys(members or [key], change.origin))
    found.update({leaf: DEFAULT for leaf in leaves if leaf not in found})  # of groups that were unset


def mark_derived(config: Any, before: dict[str, Any]) -> None:
    """Note the values that differ from ``before``, a snapshot taken with ``values`` before they were derived."""
    _table(config).update(dict.fromkeys(_changed(config, before), DERIVED))


def mark_given(config: Any, before: dict[str, Any], source: str) -> None:
    """Note that ``source`` made this config differ from one with the values ``before``; defaults stay defaults."""
    found = _table(config)
    found.update({key: source for key in _changed(config, before) if found[key] != DEFAULT})


def values(config: Any) -> dict[str, Any]:
    """Every leaf of the config by its dotted key."""
    return dict(_leaves(config))


def origin(config: Any, key: str) -> str | None:
    """Who set ``key``; ``None`` when origins are not kept for this config."""
    return _table(config).get(key)


def non_defaults(config: Any) -> list[str]:
    """A line for each value that is not its field's default: the value, the default, and where it came from.

    Derived values are left out: they follow from the others.
    """
    table = _table(config)
    return [
        f"{key}={_shown(value)}  (default {_default(entry)}{f', from {table[key]}' if key in table else ''})"
        for key, entry, value in _entries(config)
        if not _is_default(entry, value) and table.get(key) != DERIVED
    ]


def annotated_yaml(config: Any, defaults: bool = True) -> str:
    """The config as YAML that ``load_yaml`` reads, with each value's origin as a comment.

    Args:
        config: A config.
        defaults: Write the values that are their field's default, too.
    """
    table = _table(config)
    skipped = set[str]() if defaults else {key for key, source in table.items() if source == DEFAULT}
    return "".join(f"{line}\n" for line in _annotated(to_plain(config), config, "", table, skipped))


def _annotated(plain: Any, owner: Any, prefix: str, table: dict[str, str], skipped: set[str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    yield f"{indent}{TARGET}: {plain[TARGET]}"
    for entry in config_fields(owner):
        value, key = getattr(owner, entry.name), f"{prefix}{entry.name}"
        if key in skipped:
            continue
        if _is_group(value):
            yield f"{indent}{entry.name}:"
            yield from _annotated(plain[entry.name], value, f"{key}.", table, skipped)
            continue
        lines = [indent + line for line in yaml_text.write({entry.name: plain[entry.name]}).splitlines()]
        yield from _with_comment(lines, indent, table.get(key))


def _with_comment(lines: list[str], indent: str, source: str | None) -> list[str]:
    if source is None:
        return lines
    if len(lines) == 1:
        return [f"{lines[0]}  # {source}"]
    return [f"{indent}# {source}:", *lines]  # inside a value of several lines a comment could become text


def _entries(owner: Any, prefix: str = "") -> "Iterator[tuple[str, dataclasses.Field[Any], Any]]":
    """Every leaf: its dotted key, its field, its value."""
    for entry in config_fields(owner):
        value = getattr(owner, entry.name)
        if _is_group(value):
            yield from _entries(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", entry, value


def _leaves(owner: Any) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, _, value in _entries(owner))


def _differing(owner: Any) -> Iterator[tuple[str, bool]]:
    """Every leaf, and whether its value is not its field's default."""
    return ((key, not _is_default(entry, value)) for key, entry, value in _entries(owner))


def _default(entry: "dataclasses.Field[Any]") -> str:
    if entry.default_factory is not dataclasses.MISSING:
        return _shown(entry.default_factory())
    return "does not exist" if entry.default is dataclasses.MISSING else _shown(entry.default)


def _shown(value: Any) -> str:
    """Functions and classes by their names."""
    return (name_of(value) if is_named(value) else None) or repr(value)


def _is_default(entry: "dataclasses.Field[Any]", value: Any) -> bool:
    if entry.default_factory is not dataclasses.MISSING:
        return bool(entry.default_factory() == value)
    return entry.default is not dataclasses.MISSING and repr(entry.default) == repr(value)


def _is_group(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _changed(config: Any, before: dict[str, Any]) -> list[str]:
    now = values(config)
    return [key for key, value in now.items() if key not in before or repr(before[key]) != repr(value)]


def _table(config: Any) -> dict[str, str]:
    return cast("dict[str, str]", getattr(config, _ATTRIBUTE, {}))
