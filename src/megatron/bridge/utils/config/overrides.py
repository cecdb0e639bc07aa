# SPDX-License-Identifier: Apache-2.0
"""Dotted ``key=value`` overrides, typed by the dataclass they change; every mistake of a call is reported at once.

Values are YAML: ``model.num_layers=4``, ``optimizer.lr=1e-4``, ``dataset.split=[9,1,0]``,
``checkpoint.save=null``, ``model.activation_func=silu``, ``model.rope_parameters.factor=8``. What is written as a
mapping sets the members of a group: ``ddp={overlap_grad_reduce: true}``. A group that is unset (null) begins with
its defaults when a member is set: ``profiling.use_pytorch_profiler=true``.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.coerce import MisfitError, coerce, field_types
from megatron.bridge.utils.config.names import name_of
from megatron.bridge.utils.config.serialize import TARGET, config_fields, from_plain
from megatron.bridge.utils.errors import UserError

_MISSING = object()

# settings as other frameworks spell them -> as they are spelled here
OTHER_NAMES = {
    "max_steps": "train.train_iters",
    "num_steps": "train.train_iters",
    "num_train_epochs": "train.train_iters",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "batch_size": "train.global_batch_size",
    "learning_rate": "optimizer.lr",
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
}


@dataclass(frozen=True)
class Change:
    """One value that was set.

    Attributes:
        key: Dotted name, such as ``train.train_iters``.
        old: Value before.
        new: Value after.
        origin: Who asked: ``command line``, a file ...
    """

    key: str
    old: Any
    new: Any
    origin: str


@dataclass(frozen=True)
class _Request:
    """What somebody typed: ``text`` is the raw scalar when it came from a command line."""

    key: str
    value: Any
    text: str | None


def apply_overrides(config: Any, overrides: Iterable[str], origin: str = "command line") -> list[Change]:
    """Set ``a.b=c`` items on ``config``, all of them or none.

    Args:
        config: A dataclass instance of dataclasses; changed in place.
        overrides: The items.
        origin: Recorded in the changes.

    Raises:
        UserError: unknown keys, wrong types, keys given twice, fields that cannot be set; one line each.
    """
    problems: list[str] = []
    requests = [request for item in overrides if (request := _parse(item, problems)) is not None]
    return _apply(config, requests, origin, problems)


def apply_values(config: Any, values: Mapping[str, Any], origin: str) -> list[Change]:
    """Set the leaves of a nested mapping, as read from a YAML file, on ``config``, all of them or none.

    Raises:
        UserError: as ``apply_overrides``.
    """
    requests = [_Request(key, value, None) for key, value in values.items()]
    return _apply(config, requests, origin, [])


def check_types(config: Any) -> None:
    """Refuse a config, read from a file, in which a value is not what its field asks for.

    Raises:
        UserError: names every such key.
    """
    problems: list[str] = []
    for key in dotted_keys(config):
        slot = _find(config, key)
        value = slot.get()
        if _is_group(value) or (value is None and slot.nullable):
            continue
        try:
            coerce(value, slot.annotation)
        except UserError as error:
            problems.append(f"{key} {error}")
    if problems:
        raise UserError("\n".join(problems))


def check_sticks(config: Any, changes: Iterable[Change]) -> None:
    """Refuse a config in which a later step replaced a value that somebody set; of two changes the last counts.

    Raises:
        UserError: names every such key with both values.
    """
    lost = [
        f"{change.key}={change.new!r} from the {change.origin} does not stick: it became {now!r}"
        for change in {change.key: change for change in changes}.values()
        if not _same(now := _value_at(config, change.key), change.new)
    ]
    if lost:
        raise UserError("\n".join(lost))


def dotted_keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Every key that can be set, groups before their members."""
    for entry in config_fields(config):
        key = f"{prefix}{entry.name}"
        yield key
        value = getattr(config, entry.name)
        if _is_group(value):
            yield from dotted_keys(value, key + ".")


def _parse(item: str, problems: list[str]) -> _Request | None:
    key, equals, text = item.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key:
        problems.append(f"override {item!r} is not of the form key.sub=value")
        return None
    if "${" in text:
        problems.append(f"{key}={text}: ${{...}} is not interpolated here; write the value itself")
        return None
    try:
        value = yaml_text.read(text, f"the value of {key}")
    except UserError as error:
        problems.append(str(error))
        return None
    if isinstance(value, (list, dict)):
        return _Request(key, value, None)
    if _is_cut(value, text):
        problems.append(f"{key}={text}: YAML reads this as {value!r}; put the value in quotes")
        return None
    return _Request(key, value, text)


def _is_cut(value: Any, text: str) -> bool:
    """Whether YAML leaves a part of an unquoted scalar out."""
    if text.startswith(("'", '"')):
        return False
    return value != text if isinstance(value, str) else "#" in text


def _apply(config: Any, requests: list[_Request], origin: str, problems: list[str]) -> list[Change]:
    begun = [slot for request in requests for slot in _begin_groups(config, request.key.split(".")[:-1])]
    leaves = [leaf for request in requests for leaf in _leaves(config, request)]
    problems.extend(_repeated([leaf.key for leaf in leaves]))
    planned: list[tuple[_Slot, Change]] = []
    for leaf in leaves:
        try:
            slot = _find(config, leaf.key)
            planned.append((slot, Change(leaf.key, slot.get(), slot.typed(leaf), origin)))
        except UserError as error:
            problems.append(str(error))
    if problems:
        for slot in reversed(begun):
            slot.set(None)
        raise UserError("\n".join(problems))
    for slot, change in planned:
        slot.set(change.new)
    check_sticks(config, [change for _, change in planned])
    return [change for _, change in planned]


def _begin_groups(config: Any, names: list[str]) -> Iterator["_Slot"]:
    """Give the unset groups of a dotted key their defaults; yields where they were put."""
    owner: Any = config
    for depth, name in enumerate(names):
        if not _is_group(owner) or (child := _child(owner, name)) is _MISSING:
            return
        if child is None and (kind := _kind_of_unset(owner, name)) is not None:
            slot = _Slot(".".join(names[: depth + 1]), owner, name, kind, nullable=True)
            slot.set(kind())
            yield slot
        owner = getattr(owner, name)


def _kind_of_unset(owner: Any, name: str) -> "type[Any] | None":
    """The dataclass of a field ``Kind | None``; None if there is a choice, or it does not begin by itself."""
    annotation = field_types(cast("type[Any]", type(owner))).get(name)
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if len(kinds) != 1 or not dataclasses.is_dataclass(kinds[0]) or hasattr(kinds[0], "__one_of_several__"):
        return None
    entries = dataclasses.fields(kinds[0])
    given = (entry.default is entry.default_factory is dataclasses.MISSING for entry in entries if entry.init)
    return None if any(given) else cast("type[Any]", kinds[0])


def _repeated(keys: list[str]) -> list[str]:
    seen: set[str] = set()
    twice = dict.fromkeys(key for key in keys if key in seen or seen.add(key))
    return [f"{key} is given twice; keep one of the two" for key in twice]


def _leaves(config: Any, request: _Request) -> list[_Request]:
    """A mapping that is given to a group sets the members of the group; anything else is one leaf.

    A mapping that names another class than the group's own replaces the group.
    """
    current = _value_at(config, request.key)
    value: Any = request.value
    if not isinstance(value, dict) or not _is_group(current):
        return [request]
    mapping = dict(cast(dict[Any, Any], value))
    if mapping.pop(TARGET, name_of(type(current))) != name_of(type(current)):
        return [request]
    parts = [_Request(f"{request.key}.{name}", value, None) for name, value in mapping.items()]
    return [leaf for part in parts for leaf in _leaves(config, part)]


def _at_home(value: Any) -> Any:
    """A path in the home directory: the shell leaves the ``~`` of ``key=~/path`` as it is."""
    if isinstance(value, (str, Path)) and str(value).startswith("~/"):
        return type(value)(Path(value).expanduser())
    return value


@dataclass(frozen=True)
class _Slot:
    """A place that holds a value: a field of a dataclass or an item of a dict."""

    key: str
    owner: Any
    name: Any
    annotation: Any
    nullable: bool = False

    def get(self) -> Any:
        if _is_group(self.owner):
            return getattr(self.owner, self.name)
        return self.owner.get(self.name)

    def set(self, value: Any) -> None:
        if _is_group(self.owner):
            setattr(self.owner, self.name, value)
        else:
            self.owner[self.name] = value

    def typed(self, request: _Request) -> Any:
        current = self.get()
        try:
            value = from_plain(request.value)
            if value is None and self.nullable:
                return None
            if self.annotation is Any and _is_group(current) and not _is_group(value):
                members = ", ".join(entry.name for entry in config_fields(current)[:3])
                raise UserError(f"it is a group: set its members, such as {members}")
            return _at_home(coerce(value, self.annotation, request.text))
        except MisfitError as error:
            raise UserError(f"{self.key} {error}") from None
        except UserError as error:
            raise UserError(f"{self.key}: {error}") from None


def _find(config: Any, key: str) -> _Slot:
    """The slot that ``key`` names.

    Raises:
        UserError: there is none, with the nearest keys; or it may not be set.
    """
    names = key.split(".")
    owner = _owner(config, names)
    last = names[-1]
    if isinstance(owner, dict):
        return _Slot(key, owner, last, Any)
    entry = next((entry for entry in config_fields(owner) if entry.name == last), None)
    if entry is None:
        raise _derived(key) if hasattr(owner, last) else _unknown(config, key)
    kind = cast("type[Any]", type(owner))
    return _Slot(key, owner, last, field_types(kind).get(last, Any), nullable=entry.default is None)


def _owner(config: Any, names: list[str]) -> Any:
    """What holds the last of ``names``."""
    owner: Any = config
    for depth, name in enumerate(names[:-1]):
        child = _child(owner, name)
        if child is _MISSING:
            raise _unknown(config, ".".join(names))
        if not _is_group(child) and not isinstance(child, dict):
            raise _not_a_group(".".join(names), ".".join(names[: depth + 1]), child)
        owner = cast(Any, child)
    return owner


def _child(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return cast(dict[Any, Any], owner).get(name, _MISSING)
    if name not in {entry.name for entry in config_fields(owner)}:
        return _MISSING
    return getattr(owner, name)


def _unknown(config: Any, key: str) -> UserError:
    group = key.rpartition(".")[0]
    owner = _value_at(config, group) if group else config
    where = f" in {type(owner).__name__}" if group and _is_group(owner) else ""
    known = OTHER_NAMES.get(key.rpartition(".")[2])
    close = [known] if known else nearest_keys(config, key)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return UserError(f"there is no {key}{where}{hint}")


def _not_a_group(key: str, parent: str, value: Any) -> UserError:
    return UserError(f"{key} cannot be set: {parent} is {value!r}, which has no members; set {parent} itself")


def _derived(key: str) -> UserError:
    return UserError(f"{key} is computed from other values and cannot be set")


def nearest_keys(config: Any, key: str, count: int = 3) -> list[str]:
    """Settable keys closest to ``key``: namesakes in other groups, else alike in its own, else alike in all."""
    keys = list(dotted_keys(config))
    group, _, last = key.rpartition(".")
    namesakes = [name for name in keys if name.rpartition(".")[2] == last]
    if namesakes:
        return difflib.get_close_matches(key, namesakes, count, cutoff=0.0)
    siblings = {name.rpartition(".")[2]: name for name in keys if name.rpartition(".")[0] == group}
    alike = [siblings[name] for name in difflib.get_close_matches(last, siblings, count)]
    return alike or difflib.get_close_matches(key, keys, count, cutoff=0.8)


def _value_at(config: Any, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = _child(value, name) if _is_group(value) or isinstance(value, dict) else _MISSING
    return value


def _is_group(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _same(left: Any, right: Any) -> bool:
    return left is right or repr(left) == repr(right) or bool(left == right)
