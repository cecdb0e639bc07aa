# SPDX-License-Identifier: Apache-2.0
"""How a prediction treats each setting: the table ``priced.yaml``."""

from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatchcase

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.rules.values import default_of, value_of
from megatron.bridge.utils.config import yaml_text

BLOCKS = ("model", "ddp", "optimizer", "dataset")
TABLE = yaml_text.tables_beside(__file__)


def kind_of(key: str) -> str | None:
    """Return ``counted``, ``unpriced`` or ``neutral``: the first that lists the name of ``key``, or None."""
    block, _, name = key.partition(".")
    groups = {
        "counted": [TABLE["counted"]],
        "unpriced": [TABLE["unpriced"]],
        "neutral": TABLE["neutral"].values(),
    }
    for kind, found in groups.items():
        patterns = " ".join(str(group.get(block, "")) for group in found).split()
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return kind
    return None


def unpriced(config: ConfigContainer) -> Iterator[str]:
    """Yield ``key=value`` of the settings of a config that affect a run but not its prediction."""
    for block in BLOCKS:
        for entry in fields(getattr(config, block)):
            key = f"{block}.{entry.name}"
            if kind_of(key) == "unpriced" and (value := value_of(config, key)) != default_of(
                config, key
            ):
                yield f"{key}={value}"
