# SPDX-License-Identifier: Apache-2.0
"""Dotted overrides such as ``train.train_iters=100``, applied to a config of dataclasses and typed by its fields.

Values are YAML: ``model.num_layers=4``, ``optimizer.lr=1e-4``, ``dataset.split=[9,1,0]``,
``checkpoint.save=null``, ``model.activation_func=silu``, ``model.rope_parameters.factor=8``. Items of a list are
set by their index, ``dataset.blend[0]`` or ``dataset.blend.0``. A mapping sets members of a group:
``ddp={overlap_grad_reduce: true}``. Setting a member of an unset (null) group creates the group with its defaults:
``profiling.use_pytorch_profiler=true``. References to other values are resolved last, when every layer has been
applied: ``scheduler.lr_decay_iters='${train.train_iters}'``.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from megatron.bridge.utils.config import interpolation, yaml_text
from megatron.bridge.utils.config.coerce import CoercionError, coerce, field_types
from megatron.bridge.utils.config.keys import (
    MISSING,
    Slot,
    child_of,
    dotted_keys,
    find_slot,
    value_at,
)
from megatron.bridge.utils.config.names import import_path, importing, name_of
from megatron.bridge.utils.config.serialize import TARGET, config_fields, from_plain, is_group
from megatron.bridge.utils.errors import UserError, refuse

_INDEX = re.compile(r"\[(\w+)\]")


@dataclass(frozen=True)
class Change:
    key: str  # dotted name, such as ``train.train_iters``
    old: Any
    new: Any
    origin: str  # who set it: ``command line``, a file, ...


@dataclass(frozen=True)
class Layer:
    """Values from one origin; a later layer overrides an earlier one."""

    origin: str
    values: Mapping[str, Any] = dataclasses.field(
        default_factory=dict[str, Any]
    )  # nested or dotted keys
    overrides: Sequence[str] = ()  # ``a.b=value`` items, as typed on a command line


@dataclass(frozen=True)
class _Request:
    """A key and its new value."""

    key: str
    value: Any
    text: str | None = None  # the raw scalar of a command line
    from_reference: bool = False
    trusted: bool = False  # the user typed it, so its functions may be imported


def apply_overrides(
    config: Any, overrides: Sequence[str], origin: str = "command line"
) -> list[Change]:
    """Set ``a.b=c`` items on ``config``, either all or none; an error lists every item that cannot be set."""
    return apply_layers(config, [Layer(origin, overrides=overrides)])


def apply_layers(config: Any, layers: Iterable[Layer]) -> list[Change]:
    """Set the values of ``layers`` on ``config``, either all or none.

    Later layers override earlier ones, and references see the values of all layers. The result has a change for each
    key, in the order in which the keys were last set.
    """
    transaction = _Transaction(config)
    try:
        for layer in layers:
            transaction.apply(layer)
    except UserError:
        transaction.undo()
        raise
    check_sticks(config, transaction.changes)
    return transaction.changes


def settle_types(config: Any) -> None:
    """Convert each value of a config from a file to the type of its field; a name becomes the function."""
    refuse(_settle_types(config, ""))


def _settle_types(config: Any, prefix: str) -> list[str]:
    """Convert the values in place, and return a sentence for each that has the wrong type."""
    problems: list[str] = []
    for key in dotted_keys(config):
        slot = find_slot(config, key)
        if is_group(slot.value) or (slot.value is None and slot.nullable):
            continue
        try:
            value = coerce(slot.value, slot.annotation)
        except UserError as error:
            problems.append(f"{prefix}{key} {error}")
            continue
        if type(value) is not type(slot.value):
            slot.set(value)
        if isinstance(value, list | tuple):
            for index, item in enumerate(cast("list[Any]", value)):
                if is_group(item):
                    problems += _settle_types(item, f"{prefix}{key}[{index}].")
    return problems


def check_sticks(config: Any, changes: Iterable[Change]) -> None:
    """Refuse a config in which a later step replaced the user's last value of a key, unless that value is null."""
    last_changes = {change.key: change for change in changes}
    problems: list[str] = []
    for change in last_changes.values():
        current = value_at(config, change.key)
        if change.new is not None and not _still_holds(current, change.new):
            problems.append(
                f"{change.key}={change.new!r} from the {change.origin} has no effect: another setting changed it "
                f"to {current!r}"
            )
    refuse(problems)


class _Transaction:
    """Applies layers to a config and can undo them."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._changes: dict[str, Change] = {}
        self._undo: list[Callable[[], None]] = []
        self._references: dict[str, tuple[Any, str]] = {}  # key -> raw value and origin

    @property
    def changes(self) -> list[Change]:
        return list(self._changes.values())

    def undo(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def apply(self, layer: Layer) -> None:
        """Set the values of a layer, then resolve the references of all layers so far."""
        problems: list[str] = []
        leaves = [leaf for request in _requests(layer, problems) for leaf in self._split(request)]
        keys = [leaf.key for leaf in leaves]
        problems += [
            f"{key} is given twice; keep one of the two" for key in keys if keys.count(key) > 1
        ]
        self._forget_references(keys)
        referring: list[_Request] = []
        for leaf in leaves:
            if interpolation.has_reference(leaf.value):
                referring.append(leaf)
            else:
                self._set(leaf, layer.origin, problems)
        if referring or self._references:
            self._set_references(referring, layer.origin, problems)
        refuse(problems)

    def _split(self, request: _Request) -> list[_Request]:
        """Split a mapping for a group into its members, unless it names another class; any other value is one leaf."""
        value: Any = request.value
        if not isinstance(value, dict):
            return [request]
        self._create_groups(request.key)
        group = value_at(self._config, request.key)
        if not is_group(group):
            return [request]
        members = dict(cast("dict[Any, Any]", value))
        current_class = name_of(type(group)) or ""
        if import_path(str(members.pop(TARGET, current_class))) != import_path(current_class):
            return [request]
        leaves: list[_Request] = []
        for name, member_value in members.items():
            member = dataclasses.replace(request, key=f"{request.key}.{name}", value=member_value)
            leaves += self._split(member)
        return leaves

    def _create_groups(self, key: str) -> None:
        """Set the unset groups above a dotted key to their defaults."""
        owner = self._config
        names = key.split(".")
        for depth, name in enumerate(names[:-1], start=1):
            child = child_of(owner, name)
            group_class = _class_of_unset(owner, name) if child is None else None
            if group_class is not None:
                slot = find_slot(self._config, ".".join(names[:depth]))
                self._undo.append(slot.set(group_class()))
                child = child_of(owner, name)
            owner = child

    def _set(self, leaf: _Request, origin: str, problems: list[str]) -> None:
        if leaf.key.count(".") > 0:
            self._create_groups(leaf.key)
        try:
            slot = find_slot(self._config, leaf.key)
            with importing(leaf.trusted):
                value = _typed_value(slot, leaf)
        except UserError as error:
            problems.append(str(error))
            return
        self._undo.append(slot.set(value))
        previous = None if slot.value is MISSING else slot.value
        self._changes.pop(leaf.key, None)  # so that it becomes the last
        self._changes[leaf.key] = Change(leaf.key, previous, value, origin)
        for key, earlier in self._changes.items():
            if leaf.key.startswith(f"{key}."):
                self._changes[key] = dataclasses.replace(earlier, new=value_at(self._config, key))

    def _forget_references(self, keys: list[str]) -> None:
        """Drop the references of earlier layers that this layer overrides."""
        for key in list(self._references):
            if any(key == overridden or key.startswith(f"{overridden}.") for overridden in keys):
                del self._references[key]

    def _set_references(self, leaves: list[_Request], origin: str, problems: list[str]) -> None:
        """Set ``leaves`` and references of earlier layers: lists and mappings as a whole first, then their items."""
        raw = {leaf.key: leaf.value for leaf in leaves}
        members = interpolation.references_in(raw)
        self._references |= {key: (value, origin) for key, value in members.items()}
        self._resolve(
            {key: (value, origin) for key, value in raw.items() if key not in members}, problems
        )
        self._resolve(self._references, problems)

    def _resolve(self, references: dict[str, tuple[Any, str]], problems: list[str]) -> None:
        if not references:
            return
        raw = {key: value for key, (value, _) in references.items()}
        try:
            values = interpolation.resolve(raw, _value_tree(self._config))
        except UserError as error:
            problems.append(str(error))
            return
        for key, (_, origin) in references.items():
            self._set(
                _Request(key, values[key], str(values[key]), from_reference=True), origin, problems
            )


def _requests(layer: Layer, problems: list[str]) -> list[_Request]:
    """Return what a layer asks for; items that cannot be read are added to ``problems``."""
    requests = [
        _Request(_INDEX.sub(r".\1", str(key)), value) for key, value in layer.values.items()
    ]
    for item in layer.overrides:
        request = _parse_item(item, problems)
        if request is not None:
            requests.append(request)
    return requests


def _parse_item(item: str, problems: list[str]) -> _Request | None:
    key, equals, text = item.partition("=")
    key = _INDEX.sub(r".\1", key.strip())
    text = text.strip()
    if not equals or not key:
        problems.append(f"override {item!r} is not of the form key.sub=value")
        return None
    try:
        value = yaml_text.read(text, f"the value of {key}")
    except UserError as error:
        hint = "; quote ${...} inside lists and mappings" if "${" in text else ""
        problems.append(f"{error}{hint}")
        return None
    if isinstance(value, (list, dict)):
        return _Request(key, value, trusted=True)
    # YAML drops a part of some unquoted scalars
    is_quoted = text.startswith(("'", '"'))
    is_altered = value != text if isinstance(value, str) else "#" in text
    if is_altered and not is_quoted:
        problems.append(f"{key}={text}: YAML reads this as {value!r}; put the value in quotes")
        return None
    return _Request(key, value, text, trusted=True)


def _class_of_unset(owner: Any, name: str) -> "type[Any] | None":
    """Return the dataclass of a field ``Kind | None``, or None if there are several or it needs arguments."""
    if not is_group(owner):
        return None
    annotation = field_types(cast("type[Any]", type(owner))).get(name)
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if (
        len(kinds) != 1
        or not dataclasses.is_dataclass(kinds[0])
        or hasattr(kinds[0], "__one_of_several__")
    ):
        return None
    for entry in dataclasses.fields(kinds[0]):
        has_default = entry.default is not entry.default_factory  # both are MISSING without one
        if entry.init and not has_default:
            return None
    return cast("type[Any]", kinds[0])


def _value_tree(owner: Any) -> Any:
    """Return the values of a config as nested mappings and lists, for references."""
    if is_group(owner):
        return {
            entry.name: _value_tree(getattr(owner, entry.name)) for entry in config_fields(owner)
        }
    if isinstance(owner, dict):
        return {
            str(key): _value_tree(value) for key, value in cast("dict[Any, Any]", owner).items()
        }
    if isinstance(owner, (list, tuple)):
        return [_value_tree(value) for value in cast("list[Any]", owner)]
    if isinstance(owner, type):
        return name_of(owner)
    return interpolation.escape(owner) if isinstance(owner, str) else owner


def _group_error(slot: Slot) -> UserError:
    members = ", ".join(f"{slot.key}.{entry.name}" for entry in config_fields(slot.value)[:3])
    return UserError(f"it is a group: set its members, such as {members}")


def _typed_value(slot: Slot, request: _Request) -> Any:
    """Return the requested value in the type of the slot.

    Raises:
        UserError: it has another type; the message names the key.
    """
    try:
        value: Any = request.value
        if not isinstance(value, str) or "${" in value:
            value = from_plain(cast("object", value))
        if value is None and slot.nullable:
            return None
        if value == "???":
            raise UserError("??? marks a required value; set it")
        if slot.annotation is Any and is_group(slot.value) and not is_group(value):
            raise _group_error(slot)
        value = coerce(value, slot.annotation, request.text)
    except CoercionError as error:
        if request.from_reference and isinstance(request.value, str):
            # an environment variable is text: parse it like a value on the command line
            parsed = yaml_text.read(request.value, slot.key)
            return _typed_value(slot, _Request(slot.key, parsed, request.value))
        accepts_null = type(None) in get_args(slot.annotation)
        if is_group(slot.value) and not accepts_null and not isinstance(request.value, Mapping):
            raise UserError(f"{slot.key}: {_group_error(slot)}") from None
        raise UserError(f"{slot.key} {error}") from None
    except UserError as error:
        raise UserError(f"{slot.key}: {error}") from None
    if isinstance(value, str | Path) and str(value).startswith("~/"):
        return type(value)(Path(value).expanduser())  # the shell does not expand ``key=~/path``
    return value


def _still_holds(now: Any, given: Any) -> bool:
    """Return whether ``now`` equals the given value; in a block that was set as a whole, a None may be derived."""
    if now is given or repr(now) == repr(given) or bool(now == given):
        return True
    if not is_group(given) or type(now) is not type(given):
        return False
    pairs = [
        (getattr(now, entry.name), getattr(given, entry.name)) for entry in config_fields(given)
    ]
    return all(
        given_value is None or _still_holds(current_value, given_value)
        for current_value, given_value in pairs
    )
