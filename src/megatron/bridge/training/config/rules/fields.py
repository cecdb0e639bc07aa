# SPDX-License-Identifier: Apache-2.0
"""Rules on names and choices that a script can misspell without an error."""

import dataclasses
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.config.coerce import field_types
from megatron.bridge.utils.config.serialize import phantom_attributes

NOT_YET = ("tensor_inspect",)


def attributes_are_fields(config: RunConfig, world_size: int) -> str | None:
    """A misspelled attribute would be set and never read."""
    found = [sentence for key, block in _blocks(config) for sentence in phantom_attributes(block, key)]
    return "; ".join(found) or None


def literals_are_known(config: RunConfig, world_size: int) -> str | None:
    """A misspelled choice would count as another one. Megatron-Core checks the model's choices."""
    wrong = [
        f"{key}.{name}={value}: use one of {', '.join(map(str, choices))}"
        for key, block in _blocks(config)
        if block is not config.model
        for name, annotation in field_types(type(block)).items()
        if (choices := _choices(annotation)) and (value := getattr(block, name)) not in choices
    ]
    return "; ".join(wrong) or None


def unavailable_blocks_are_unset(config: RunConfig, world_size: int) -> str | None:
    """Blocks of features that do not exist yet would be ignored."""
    used = [name for name in NOT_YET if getattr(config, name) is not None]
    return f"{', '.join(used)}: not available in this version, leave unset" if used else None


def _blocks(config: RunConfig) -> Iterator[tuple[str, Any]]:
    yield "", config
    yield from ((key, block) for key, block in vars(config).items() if dataclasses.is_dataclass(block))


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The choices of a ``Literal`` annotation, None included; empty for any other annotation."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = [member for member in get_args(annotation) if member is not NoneType]
    if len(members) == 1 and get_origin(members[0]) is Literal:
        return (*get_args(members[0]), None)
    return ()
