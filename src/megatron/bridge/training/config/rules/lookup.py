# SPDX-License-Identifier: Apache-2.0
"""Values of a config by their dotted keys."""

import dataclasses
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
    for entry in dataclasses.fields(owner) if owner is not None and name else ():
        if entry.name == name:
            made = entry.default_factory
            return entry.default if made is dataclasses.MISSING else made()
    return None
