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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin

from megatron.bridge.utils.config import interpolation, yaml_text
from megatron.bridge.utils.config.coerce import CoercionError, coerce, field_types
from megatron.bridge.utils.config.names import import_path, importing, name_of
from megatron.bridge.utils.config.serialize import TARGET, config_fields, from_plain, is_group
from megatron.bridge.utils.errors import UserError, nearest_keys, refuse, suggestion

_MISSING = object()
_INDEX = re.compile(r"\[(\w+)\]")

OTHER_NAMES = {
    "max_steps": "train.train_iters",
    "num_steps": "train.train_iters",
    "num_train_epochs": "train.num_epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "batch_size": "train.global_batch_size",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "lr_scheduler_type": "scheduler.lr_decay_style",
    "warmup_steps": "scheduler.lr_warmup_iters",
    "warmup_ratio": "scheduler.lr_warmup_fraction",
    "max_grad_norm": "optimizer.clip_grad",
    "output_dir": "checkpoint.save",
    "save_steps": "checkpoint.save_interval",
    "save_total_limit": "checkpoint.most_recent_k",
    "eval_steps": "validation.eval_interval",
    "logging_steps": "logger.log_interval",
    "max_seq_length": "dataset.seq_length",
    "max_length": "dataset.seq_length",
    "num_hidden_layers": "model.num_layers",
    "intermediate_size": "model.ffn_hidden_size",
    "num_key_value_heads": "model.num_query_groups",
    "precision": "mixed_precision",
    "gradient_checkpointing": "model.recompute_granularity",
    "hybrid_layer_pattern": "model.hybrid_override_pattern",
}
"""Settings as other frameworks spell them -> their keys here, for suggestions."""


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
    refuse([*_settle_types(config, "")])


def _settle_types(config: Any, prefix: str) -> Iterator[str]:
    for key in dotted_keys(config):
        slot = _find_slot(config, key)
        value = slot.get()
        if is_group(value) or (value is None and slot.nullable):
            continue
        try:
            coerced = coerce(value, slot.annotation)
        except UserError as error:
            yield f"{prefix}{key} {error}"
            continue
        if type(coerced) is not type(value):
            slot.set(coerced)
        for index, item in enumerate(
            cast("list[Any]", coerced) if isinstance(coerced, list | tuple) else ()
        ):
            if is_group(item):
                yield from _settle_types(item, f"{prefix}{key}[{index}].")


def check_sticks(config: Any, changes: Iterable[Change]) -> None:
    """Refuse a config in which a later step replaced the user's last value of a key, unless that value is null."""
    refuse(
        [
            f"{change.key}={change.new!r} from the {change.origin} has no effect: another setting changed it to {now!r}"
            for change in {change.key: change for change in changes}.values()
            if change.new is not None
            and not _still_holds(now := _value_at(config, change.key), change.new)
        ]
    )


def dotted_keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Return every key that can be set, groups before their members."""
    for entry in config_fields(config):
        key = f"{prefix}{entry.name}"
        yield key
        value = getattr(config, entry.name)
        if is_group(value):
            yield from dotted_keys(value, key + ".")


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
        requests = [_Request(_dotted_index(key), value) for key, value in layer.values.items()]
        requests += [
            request
            for item in layer.overrides
            if (request := _parse_item(item, problems)) is not None
        ]
        for request in requests:
            self._create_groups(request.key.split(".")[:-1])
        leaves = [leaf for request in requests for leaf in _split_leaves(self._config, request)]
        keys = [leaf.key for leaf in leaves]
        problems += [
            f"{key} is given twice; keep one of the two" for key in keys if keys.count(key) > 1
        ]
        self._forget(keys)
        referring = [leaf for leaf in leaves if interpolation.has_reference(leaf.value)]
        for leaf in leaves:
            if not interpolation.has_reference(leaf.value):
                self._set(leaf, layer.origin, problems)
        self._set_references(referring, layer.origin, problems)
        refuse(problems)

    def _create_groups(self, names: list[str]) -> None:
        """Set the unset groups of a dotted key to their defaults."""
        owner: Any = self._config
        for depth, name in enumerate(names):
            if (child := _child_of(owner, name)) is _MISSING:
                return
            if (
                child is None
                and is_group(owner)
                and (kind := _class_of_unset(owner, name)) is not None
            ):
                self._undo.append(
                    _find_slot(self._config, ".".join(names[: depth + 1])).set(kind())
                )
            owner = _child_of(owner, name)

    def _set(self, leaf: _Request, origin: str, problems: list[str]) -> None:
        try:
            slot = _find_slot(self._config, leaf.key)
            with importing(leaf.trusted):
                change = Change(leaf.key, slot.get(), slot.typed(leaf), origin)
        except UserError as error:
            problems.append(str(error))
            return
        self._undo.append(slot.set(change.new))
        self._changes.pop(leaf.key, None)
        self._changes[leaf.key] = change
        for key, earlier in self._changes.items():
            if leaf.key.startswith(f"{key}."):
                self._changes[key] = dataclasses.replace(earlier, new=_value_at(self._config, key))

    def _forget(self, keys: list[str]) -> None:
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


def _dotted_index(key: str) -> str:
    return _INDEX.sub(r".\1", str(key))


def _parse_item(item: str, problems: list[str]) -> _Request | None:
    key, equals, text = item.partition("=")
    key, text = _dotted_index(key.strip()), text.strip()
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
    if _loses_text(value, text):
        problems.append(f"{key}={text}: YAML reads this as {value!r}; put the value in quotes")
        return None
    return _Request(key, value, text, trusted=True)


def _loses_text(value: Any, text: str) -> bool:
    """Return whether YAML drops a part of an unquoted scalar."""
    if text.startswith(("'", '"')):
        return False
    return value != text if isinstance(value, str) else "#" in text


def _class_of_unset(owner: Any, name: str) -> "type[Any] | None":
    """Return the dataclass of a field ``Kind | None``, or None if there are several or it needs arguments."""
    annotation = field_types(cast("type[Any]", type(owner))).get(name)
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if (
        len(kinds) != 1
        or not dataclasses.is_dataclass(kinds[0])
        or hasattr(kinds[0], "__one_of_several__")
    ):
        return None
    entries = dataclasses.fields(kinds[0])
    required = (
        entry.default is entry.default_factory is dataclasses.MISSING
        for entry in entries
        if entry.init
    )
    return None if any(required) else cast("type[Any]", kinds[0])


def _split_leaves(config: Any, request: _Request) -> list[_Request]:
    """Split a mapping for a group into its members, unless it names another class; any other value is one leaf."""
    current = _value_at(config, request.key)
    value: Any = request.value
    if not isinstance(value, dict) or not is_group(current):
        return [request]
    mapping = dict(cast(dict[Any, Any], value))
    current_class = name_of(type(current)) or ""
    if import_path(str(mapping.pop(TARGET, current_class))) != import_path(current_class):
        return [request]
    parts = [
        dataclasses.replace(request, key=f"{request.key}.{name}", value=value)
        for name, value in mapping.items()
    ]
    return [leaf for part in parts for leaf in _split_leaves(config, part)]


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


def _expand_home(value: Any) -> Any:
    """Expand the ``~`` of ``key=~/path``, which the shell does not expand."""
    if isinstance(value, (str, Path)) and str(value).startswith("~/"):
        return type(value)(Path(value).expanduser())
    return value


@dataclass(frozen=True)
class _Slot:
    """The place of a value: a field of a dataclass, or an item of a dict, list or tuple."""

    key: str
    owner: Any
    name: str
    annotation: Any
    nullable: bool
    parent: "_Slot | None"

    def get(self) -> Any:
        value = _child_of(self.owner, self.name)
        return None if value is _MISSING else value

    def set(self, value: Any) -> Callable[[], None]:
        """Set the value, and return a function that undoes it."""
        old, owner = _child_of(self.owner, self.name), self.owner
        if is_group(owner):
            setattr(owner, self.name, value)
            return lambda: setattr(owner, self.name, old)
        if isinstance(owner, dict):
            owner[self.name] = value
            return lambda: _restore_member(cast("dict[str, Any]", owner), self.name, old)
        assert self.parent is not None, "a config is not a list"
        items = list(
            self.parent.get()
        )  # a copy: a recipe may share its list, and a tuple cannot change
        items[int(self.name)] = value
        return self.parent.set(type(owner)(items))

    def typed(self, request: _Request) -> Any:
        try:
            return self._typed(request.value, request.text)
        except CoercionError as error:
            if not (request.from_reference and isinstance(request.value, str)):
                raise UserError(f"{self.key} {error}") from None
        except UserError as error:
            raise UserError(f"{self.key}: {error}") from None
        # an environment variable is text: parse it like a value on the command line
        return self.typed(
            _Request(self.key, yaml_text.read(request.value, self.key), request.value)
        )

    def _typed(self, raw: Any, text: str | None) -> Any:
        value, current = from_plain(raw), self.get()
        if value is None and self.nullable:
            return None
        if value == "???":
            raise UserError("??? marks a required value; set it")
        if self.annotation is Any and is_group(current) and not is_group(value):
            members = ", ".join(entry.name for entry in config_fields(current)[:3])
            raise UserError(f"it is a group: set its members, such as {members}")
        return _expand_home(coerce(value, self.annotation, text))


def _restore_member(owner: dict[str, Any], name: str, old: Any) -> None:
    if old is _MISSING:
        del owner[name]
    else:
        owner[name] = old


def _find_slot(config: Any, key: str) -> _Slot:
    """Return the slot of ``key``, which must exist and be settable; an error names the nearest keys."""
    names = key.split(".")
    owner, slot = config, _Slot("", None, "", Any, False, None)
    for depth, name in enumerate(names):
        if not is_group(owner) and not isinstance(owner, (dict, list, tuple)):
            raise UserError(
                f"{key} cannot be set: {slot.key} is {owner!r}, which has no members; set {slot.key} itself"
            )
        child = _child_of(owner, name)
        if child is _MISSING and not (isinstance(owner, dict) and depth == len(names) - 1):
            raise _missing_key(config, key, slot.key, owner)
        path = ".".join(names[: depth + 1])
        slot = _Slot(path, owner, name, *_member_annotation(owner, name, slot.annotation), slot)
        owner = child
    return slot


def _member_annotation(owner: Any, name: str, annotation: Any) -> tuple[Any, bool]:
    """Return the type of a member from the ``annotation`` of its owner, and whether None is its default."""
    if is_group(owner):
        entry = next(entry for entry in config_fields(owner) if entry.name == name)
        return field_types(cast("type[Any]", type(owner))).get(name, Any), entry.default is None
    for kind in (annotation, *get_args(annotation)):  # the members of a union
        if (args := get_args(kind)) and get_origin(kind) is type(owner):
            if isinstance(owner, tuple):
                return args[0 if args[-1] is Ellipsis else int(name)], False
            return args[-1], False
    return Any, False


def _child_of(owner: Any, name: str) -> Any:
    if is_group(owner):
        return (
            getattr(owner, name)
            if name in {entry.name for entry in config_fields(owner)}
            else _MISSING
        )
    if isinstance(owner, dict):
        return cast(dict[Any, Any], owner).get(name, _MISSING)
    if isinstance(owner, (list, tuple)):
        items = cast("list[Any]", owner)
        return items[int(name)] if name.isdecimal() and int(name) < len(items) else _MISSING
    return _MISSING


def _missing_key(config: Any, key: str, parent: str, owner: Any) -> UserError:
    group, _, last = key.rpartition(".")
    if isinstance(owner, (list, tuple)):
        count = len(cast("list[Any]", owner))
        return UserError(
            f"there is no {key}: {parent} has {count} items, counted from 0; set {parent} itself"
        )
    if group == parent and hasattr(owner, last):
        return UserError(f"{key} is computed from other values and cannot be set")
    owner_phrase = f" in {type(owner).__name__}" if group and group == parent else ""
    unavailable: frozenset[str] = getattr(config, "UNAVAILABLE_KEYS", frozenset())
    keys = [name for name in dotted_keys(config) if name not in unavailable]
    known = OTHER_NAMES.get(last)
    close = [known] if known in keys else nearest_keys(key, keys)
    return UserError(f"there is no {key}{owner_phrase}{suggestion(close)}")


def _value_at(config: Any, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = _child_of(value, name)
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
