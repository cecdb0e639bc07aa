# SPDX-License-Identifier: Apache-2.0
"""The origin of each value of a config: default, recipe, file, command line, or derived from other values."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.keys import leaf_entries, leaf_values
from megatron.bridge.utils.config.names import is_named, name_of
from megatron.bridge.utils.config.overrides import Change
from megatron.bridge.utils.config.serialize import TARGET, config_fields, is_group, to_plain

DEFAULT = "default"
DERIVED = "derived"


class Origins:
    """The origin of each value of a config, by dotted key."""

    def __init__(self, table: dict[str, str]) -> None:
        self._table = table

    @classmethod
    def of(cls, config: Any, source: str = "recipe") -> "Origins":
        """Return the origins of a new config: ``source`` for values that differ from the defaults of their fields."""
        return cls(
            {
                key: DEFAULT if _is_default(entry, value) else source
                for key, entry, value in leaf_entries(config)
            }
        )

    def get(self, key: str) -> str | None:
        return self._table.get(key)

    def record(self, config: Any, changes: Iterable[Change]) -> None:
        leaves = leaf_values(config)
        for change in changes:
            key = change.key
            members = [
                leaf for leaf in leaves if leaf.startswith(f"{key}.")
            ]  # the group was set as a whole
            while (
                key not in leaves and not members and "." in key
            ):  # a member of a mapping counts for the mapping
                key = key.rpartition(".")[0]
            self._table.update(dict.fromkeys(members or [key], change.origin))
        self._table = (
            dict.fromkeys(leaves, DEFAULT) | self._table
        )  # leaves of groups that were unset

    def record_given(self, config: Any, before: dict[str, Any], source: str) -> None:
        """Record ``source`` as the origin of values that differ from ``before``; defaults stay defaults."""
        changed = _changed_keys(config, before)
        self._table.update({key: source for key in changed if self._table[key] != DEFAULT})

    def record_derived(self, config: Any, before: dict[str, Any]) -> None:
        """Record the values that differ from ``before`` as derived."""
        self._table.update(dict.fromkeys(_changed_keys(config, before), DERIVED))

    def copy(self) -> "Origins":
        return Origins(dict(self._table))

    def defaults(self) -> set[str]:
        """Return the keys whose value is the default of their field."""
        return {key for key, source in self._table.items() if source == DEFAULT}


def non_defaults(config: Any, origins: Origins | None = None) -> list[str]:
    """Return a line with value, default and origin of each value that is neither its field's default nor derived."""
    origins = origins or Origins({})
    lines: list[str] = []
    for key, entry, value in leaf_entries(config):
        source = origins.get(key)
        if not _is_default(entry, value) and source != DERIVED:
            known = f", from {source}" if source else ""
            lines.append(f"{key}={_shown_value(value)}  (default {_default_text(entry)}{known})")
    return lines


def annotated_yaml(config: Any, origins: Origins, defaults: bool = True) -> str:
    """Return the config as YAML for ``load_yaml``, with the origin of each value as a comment."""
    skipped = set[str]() if defaults else origins.defaults()
    return "".join(
        f"{line}\n" for line in _annotated_lines(to_plain(config), config, "", origins, skipped)
    )


def _annotated_lines(
    plain: Any, owner: Any, prefix: str, origins: Origins, skipped: set[str]
) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    yield f"{indent}{TARGET}: {plain[TARGET]}"
    for entry in config_fields(owner):
        value = getattr(owner, entry.name)
        key = f"{prefix}{entry.name}"
        if key in skipped:
            continue
        if is_group(value):
            yield f"{indent}{entry.name}:"
            yield from _annotated_lines(plain[entry.name], value, f"{key}.", origins, skipped)
            continue
        lines = [
            indent + line for line in yaml_text.write({entry.name: plain[entry.name]}).splitlines()
        ]
        yield from _with_comment(lines, indent, origins.get(key))


def _with_comment(lines: list[str], indent: str, source: str | None) -> list[str]:
    if source is None:
        return lines
    if len(lines) == 1:
        return [f"{lines[0]}  # {source}"]
    return [
        f"{indent}# {source}:",
        *lines,
    ]  # inside a value of several lines a comment could become text


def _default_text(entry: "dataclasses.Field[Any]") -> str:
    if entry.default_factory is not dataclasses.MISSING:
        return _shown_value(entry.default_factory())
    return "does not exist" if entry.default is dataclasses.MISSING else _shown_value(entry.default)


def _shown_value(value: Any) -> str:
    """Format a value; functions and classes are shown by their names."""
    return (name_of(value) if is_named(value) else None) or repr(value)


def _is_default(entry: "dataclasses.Field[Any]", value: Any) -> bool:
    if entry.default_factory is not dataclasses.MISSING:
        return bool(entry.default_factory() == value)
    return entry.default is not dataclasses.MISSING and repr(entry.default) == repr(value)


def _changed_keys(config: Any, before: dict[str, Any]) -> list[str]:
    now = leaf_values(config)
    return [
        key for key, value in now.items() if key not in before or repr(before[key]) != repr(value)
    ]
