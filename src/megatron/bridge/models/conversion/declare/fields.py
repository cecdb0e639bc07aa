# SPDX-License-Identifier: Apache-2.0
"""Keys of a Hugging Face config and the provider's attributes they stand for, converted in both directions.

Every key of a config is claimed by a field, listed as irrelevant, or refused by name: ignoring a key could change what
the model computes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError, misspelling

REQUIRED: Any = object()
"""Marks a field whose key must be there."""

ABSENT: Any = object()
"""What a field writes for a key that is not to be there."""


@dataclass(frozen=True)
class Field:
    """One key and the attributes that it sets."""

    hf: str
    """Key of the Hugging Face config."""
    megatron: str | tuple[str, ...]
    """Attribute of the provider, or several."""
    default: Any = REQUIRED
    """Value of an absent key."""
    to: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """(value, whole Hugging Face config) -> value, or values, of ``megatron``; None takes it as it is."""
    back: Callable[[Any, Any], Any] | None = None
    """(value or values, provider) -> value of ``hf``; None takes the first as it is."""

    @property
    def names(self) -> tuple[str, ...]:
        """The provider's attributes."""
        return (self.megatron,) if isinstance(self.megatron, str) else self.megatron

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The provider's attributes as ``config`` sets them.

        Raises:
            UserError: the key is missing, or its value cannot be represented.
        """
        value = config.get(self.hf, self.default)
        if value is REQUIRED:
            raise UserError(f"key {self.hf} is missing")
        found = self.to(value, config) if self.to else value
        if isinstance(self.megatron, str):
            return {self.megatron: found}
        values: Sequence[Any] = found if self.to else [found] * len(self.megatron)
        return dict(zip(self.megatron, values, strict=True))

    def write(self, provider: Any) -> Any:
        """The key's value as ``provider`` has it."""
        values = tuple(getattr(provider, name) for name in self.names)
        value = values[0] if isinstance(self.megatron, str) else values
        if self.back:
            return self.back(value, provider)
        return values[0]


def constant(key: str, *values: Any) -> Field:
    """A key that has one of ``values`` in every model of an architecture; the first is written to configs."""

    def check(value: Any, _: Mapping[str, Any]) -> tuple[()]:
        _refuse_others(key, value, values)
        return ()

    return Field(key, (), default=values[0], to=check, back=lambda _, __: values[0])


def named(key: str, megatron: str, names: Mapping[Any, Any], default: Any = REQUIRED) -> Field:
    """A key whose values have other names in the provider: Hugging Face's name -> the provider's."""

    def to(value: Any, _: Any) -> Any:
        _refuse_others(key, value, names)
        return names[value]

    def back(found: Any, _: Any) -> Any:
        return next((name for name, own in names.items() if own == found), None)

    return Field(key, megatron, default=default, to=to, back=back)


def _refuse_others(key: str, value: Any, known: Iterable[Any]) -> None:
    if value not in known:
        raise UserError(f"{key}={value!r} is not supported: {' and '.join(map(repr, known))} are")


def optional(key: str, megatron: str, default: int = 0) -> Field:
    """A number where 0 means none."""
    return Field(key, megatron, default=default, to=lambda count, _: count or None, back=lambda count, _: count or 0)


def read_by_others(key: str, default: Any, back: Callable[[Any], Any]) -> Field:
    """A key that other fields read in their ``to``; ``back`` gets the provider."""

    def nothing(_: Any, __: Any) -> tuple[()]:
        return ()

    return Field(key, (), default=default, to=nothing, back=lambda _, provider: back(provider))


def override(fields: Iterable[Field], *own: Field) -> tuple[Field, ...]:
    """``fields``, with an architecture's ``own`` in place of those that set the same attributes."""
    taken = {name for field in own for name in field.names}
    return (*(field for field in fields if not taken & set(field.names)), *own)


def kind_indices(key: str, kinds: Sequence[str], known: Sequence[str], config: Mapping[str, Any]) -> list[int]:
    """The index in ``known`` of each layer's kind, which ``key`` of the config lists.

    Raises:
        UserError: a kind is not known, or the list is not as long as the model.
    """
    layers = config["num_hidden_layers"]
    if len(kinds) != layers or not set(kinds) <= set(known):
        raise UserError(f"{key}={kinds} must say {' or '.join(known)} for num_hidden_layers={layers}")
    return [known.index(kind) for kind in kinds]


def layers_of_kind(key: str, megatron: str, kinds: tuple[str, str]) -> Field:
    """A field for the kind of each layer: 1 in the provider for the second of ``kinds``."""
    return Field(
        key,
        megatron,
        to=lambda names, config: kind_indices(key, names, kinds, config),
        back=lambda layers, _: [kinds[layer] for layer in layers],
    )


_TABLES = yaml_text.tables_beside(__file__)
# key -> the values with which it changes nothing; None: with no value does it change anything
IRRELEVANT: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(key for keys in _TABLES["unused"] for key in keys),
    **{key: tuple(values) for key, values in _TABLES["harmless"].items()},
}


HarmlessKeys = Mapping[str, tuple[Any, ...] | None]
"""Keys that change nothing: always (None), or with the listed values only."""

KeyHint = Callable[[str, Iterable[str]], str]
"""(unknown key, known keys) -> how a sentence about the unknown one ends."""


def _hint(key: str, claimed: Iterable[str]) -> str:
    return misspelling(key, claimed) or ", remove it if it changes nothing"


def read_all(
    fields: Iterable[Field], config: Mapping[str, Any], irrelevant: HarmlessKeys = IRRELEVANT, hint: KeyHint = _hint
) -> dict[str, Any]:
    """The provider's attributes that ``config`` sets.

    Raises:
        UserError: keys that are unknown, missing, out of range or at odds, all in one message.
    """
    fields = tuple(fields)
    problems = unknown_keys(fields, config, irrelevant, hint)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field in fields:
        try:
            found = field.read(config)
        except UserError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{origins[name]}={config.get(origins[name])!r} and {field.hf}={config.get(field.hf)!r} set {name} to "
            f"{values[name]!r} and to {value!r}: Megatron-Core has one setting for both, so make them agree"
            for name, value in found.items()
            if name in values and values[name] != value
        ]
        values |= found
        origins |= dict.fromkeys(found, field.hf)
    if problems:
        raise UserError("; ".join(dict.fromkeys(problems)))
    return values


def unknown_keys(
    fields: Iterable[Field], config: Mapping[str, Any], irrelevant: HarmlessKeys, hint: KeyHint = _hint
) -> list[str]:
    """One phrase for each key that no field claims and that could change the computation."""
    claimed = {field.hf for field in fields}
    problems: list[str] = []
    for key, value in config.items():
        if key in claimed:
            continue
        if key not in irrelevant:
            problems.append(f"key {key}={value!r} is not known{hint(key, claimed)}")
        elif (harmless := irrelevant[key]) is not None and value not in harmless:
            problems.append(f"{key}={value!r} is not supported")
    return problems


def write_all(fields: Iterable[Field], provider: Any) -> dict[str, Any]:
    """The Hugging Face config, as far as the fields cover it."""
    written = {field.hf: field.write(provider) for field in fields}
    return {key: value for key, value in written.items() if value is not ABSENT}


def changed_keys(fields: Iterable[Field], provider: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose value in ``config`` no longer means what ``provider`` has, with their new values."""
    changed: dict[str, Any] = {}
    for field in fields:
        meant = field.read(config)
        if any(getattr(provider, name) != value for name, value in meant.items()):
            value = field.write(provider)
            if value != config.get(field.hf):
                changed[field.hf] = value
    return changed
