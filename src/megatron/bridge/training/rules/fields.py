# SPDX-License-Identifier: Apache-2.0
"""Rules on names and words, which a script may misspell without an error."""

import dataclasses
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.config.coerce import field_types
from megatron.bridge.utils.config.serialize import phantom_attributes


def attributes_are_fields(config: ConfigContainer, world_size: int) -> str | None:
    """One that is misspelt would be set, and never read."""
    found = [sentence for key, block in _blocks(config) for sentence in phantom_attributes(block, key)]
    return "; ".join(found) or None


def words_are_known(config: ConfigContainer, world_size: int) -> str | None:
    """One that is misspelt would count as another; Megatron-Core looks at those of the model."""
    wrong = [
        f"{key}.{name}={value}: use one of {', '.join(map(str, choices))}"
        for key, block in _blocks(config)
        if block is not config.model
        for name, annotation in field_types(type(block)).items()
        if (choices := _choices(annotation)) and (value := getattr(block, name)) not in choices
    ]
    return "; ".join(wrong) or None


def _blocks(config: ConfigContainer) -> Iterator[tuple[str, Any]]:
    yield "", config
    yield from ((key, block) for key, block in vars(config).items() if dataclasses.is_dataclass(block))


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a ``Literal``, also of one that may be None; none for any other annotation."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = [member for member in get_args(annotation) if member is not NoneType]
    if len(members) == 1 and get_origin(members[0]) is Literal:
        return (*get_args(members[0]), None)
    return ()
