# SPDX-License-Identifier: Apache-2.0
"""Find the values of a config by their dotted keys.

A key names fields of nested dataclasses, members of mappings, and items of lists: ``train.train_iters``,
``model.rope_parameters.factor``, ``dataset.blend.0``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast, get_args, get_origin

from megatron.bridge.utils.config.coerce import field_types
from megatron.bridge.utils.config.serialize import config_fields, is_group
from megatron.bridge.utils.errors import UserError, nearest_keys, suggestion

MISSING: Any = object()
"""What a key that does not exist refers to."""

OTHER_NAMES = {
    "also_hf": "checkpoint.also_save_hf_checkpoint",
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


def value_at(config: Any, key: str) -> Any:
    """Return the value of ``key``, or ``MISSING``."""
    value: Any = config
    for name in key.split("."):
        value = child_of(value, name)
    return value


def child_of(owner: Any, name: str) -> Any:
    """Return the field, member or item ``name`` of ``owner``, or ``MISSING``."""
    if is_group(owner):
        kind = cast("type[Any]", type(owner))
        return getattr(owner, name) if name in _fields_by_name(kind) else MISSING
    if isinstance(owner, dict):
        return cast("dict[Any, Any]", owner).get(name, MISSING)
    if isinstance(owner, (list, tuple)):
        items = cast("list[Any]", owner)
        return items[int(name)] if name.isdecimal() and int(name) < len(items) else MISSING
    return MISSING


def dotted_keys(config: Any) -> Iterator[str]:
    """Yield every key that can be set, groups before their members."""
    for key, _, _ in _entries(config, ""):
        yield key


def leaf_entries(config: Any) -> "Iterator[tuple[str, dataclasses.Field[Any], Any]]":
    """Yield the key, the field and the value of each leaf: each field that holds no group."""
    for key, entry, value in _entries(config, ""):
        if not is_group(value):
            yield key, entry, value


def leaf_values(config: Any) -> dict[str, Any]:
    """Return the values of all leaves by key."""
    return {key: value for key, _, value in leaf_entries(config)}


def _entries(owner: Any, prefix: str) -> "Iterator[tuple[str, dataclasses.Field[Any], Any]]":
    for entry in config_fields(owner):
        value = getattr(owner, entry.name)
        yield f"{prefix}{entry.name}", entry, value
        if is_group(value):
            yield from _entries(value, f"{prefix}{entry.name}.")


@functools.cache
def _fields_by_name(kind: Any) -> "dict[str, dataclasses.Field[Any]]":
    return {entry.name: entry for entry in config_fields(kind)}


@dataclass(frozen=True)
class Slot:
    """Where a value is stored: a field of a dataclass, or an item of a dict, list or tuple.

    Attributes:
        key: Dotted key of the value.
        value: The value itself, or ``MISSING``: a mapping takes new members.
        owner: What holds it.
        name: Its name in ``owner``.
        annotation: The type that it must have.
        nullable: Whether None is the default of the field.
        parent: The slot of ``owner``; None for a field of the config itself.
    """

    key: str
    value: Any
    owner: Any
    name: str
    annotation: Any
    nullable: bool
    parent: "Slot | None"

    def set(self, value: Any) -> Callable[[], None]:
        """Set the value, and return a function that restores the previous one."""
        previous = self.value
        owner = self.owner
        name = self.name
        if is_group(owner):
            setattr(owner, name, value)
            return lambda: setattr(owner, name, previous)
        if isinstance(owner, dict):
            members = cast("dict[str, Any]", owner)
            members[name] = value
            return lambda: _restore_member(members, name, previous)
        assert self.parent is not None, "a config is not a list"
        # a copy: a recipe may share its list, and a tuple cannot change
        items = list(cast("list[Any]", owner))
        items[int(name)] = value
        return self.parent.set(type(owner)(items))


def _restore_member(owner: dict[str, Any], name: str, previous: Any) -> None:
    if previous is MISSING:
        del owner[name]
    else:
        owner[name] = previous


def find_slot(config: Any, key: str) -> Slot:
    """Return the slot of ``key``.

    Raises:
        UserError: there is no such key, or it cannot be set; the message names the nearest keys.
    """
    names = key.split(".")
    owner: Any = config
    slot: Slot | None = None
    for depth, name in enumerate(names):
        owner_key = slot.key if slot else ""
        if not _has_members(owner):
            raise UserError(
                f"{key} cannot be set: {owner_key} is {owner!r}, which has no members; set {owner_key} itself"
            )
        value = child_of(owner, name)
        is_last = depth == len(names) - 1
        if value is MISSING and not (is_last and _takes_new_members(owner)):
            raise _unknown_key(config, key, owner_key, owner)
        if is_group(owner):
            annotation = field_types(cast("type[Any]", type(owner))).get(name, Any)
            nullable = _fields_by_name(type(owner))[name].default is None
        else:
            annotation = _item_annotation(owner, name, slot.annotation if slot else Any)
            nullable = False
        slot = Slot(".".join(names[: depth + 1]), value, owner, name, annotation, nullable, slot)
        owner = value
    assert slot is not None
    return slot


def _has_members(owner: Any) -> bool:
    return is_group(owner) or isinstance(owner, dict | list | tuple)


def _takes_new_members(owner: Any) -> bool:
    return isinstance(owner, dict)


def _item_annotation(owner: Any, name: str, annotation: Any) -> Any:
    """Return the type of an item of a dict, list or tuple that is annotated as ``annotation``."""
    for kind in (annotation, *get_args(annotation)):  # the members of a union
        arguments = get_args(kind)
        if not arguments or get_origin(kind) is not type(owner):
            continue
        if isinstance(owner, tuple) and arguments[-1] is not Ellipsis:
            return arguments[int(name)]
        return arguments[0] if isinstance(owner, tuple) else arguments[-1]
    return Any


def _unknown_key(config: Any, key: str, owner_key: str, owner: Any) -> UserError:
    group, _, last = key.rpartition(".")
    if isinstance(owner, (list, tuple)):
        count = len(cast("list[Any]", owner))
        return UserError(
            f"there is no {key}: {owner_key} has {count} items, counted from 0; set {owner_key} itself"
        )
    if group == owner_key and hasattr(owner, last):
        return UserError(f"{key} is computed from other values and cannot be set")
    owner_phrase = f" in {type(owner).__name__}" if group and group == owner_key else ""
    unavailable: frozenset[str] = getattr(config, "UNAVAILABLE_KEYS", frozenset())
    keys = [name for name in dotted_keys(config) if name not in unavailable]
    known = OTHER_NAMES.get(last)
    # propose the known key if the config has no such group, but not if the group lacks the key
    is_absent = known and known.partition(".")[0] in keys and known not in keys
    close = [known] if known and not is_absent else nearest_keys(key, keys)
    return UserError(f"there is no {key}{owner_phrase}{suggestion(close)}")
