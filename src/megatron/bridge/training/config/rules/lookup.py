# SPDX-License-Identifier: Apache-2.0
"""Values of a config by their dotted keys."""

import dataclasses
import functools
from typing import Any

from megatron.bridge.training.config.run_config import RunConfig


def value_of(config: RunConfig, key: str) -> Any:
    """The value of ``block.name``, or of ``block`` itself; None if the block is unset or has no such field."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def default_of(config: RunConfig, key: str) -> Any:
    """The default of the field ``block.name``; None if the block is unset or has no such field."""
    block, _, name = key.partition(".")
    owner: Any = getattr(config, block)
    entry = _fields(type(owner)).get(name) if owner is not None and name else None
    if entry is None:
        return None
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()


@functools.cache
def _fields(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    return {entry.name: entry for entry in dataclasses.fields(kind)}
