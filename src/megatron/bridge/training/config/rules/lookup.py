# SPDX-License-Identifier: Apache-2.0
"""Values of a config by their dotted keys."""

from typing import Any

from megatron.bridge.training.config.run_config import RunConfig


def value_of(config: RunConfig, key: str) -> Any:
    """The value of ``block.name``, or of ``block`` itself; None if the block is unset or has no such field."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
