# SPDX-License-Identifier: Apache-2.0
"""Rules on settings that need or exclude each other."""

import dataclasses
from collections.abc import Iterator

from megatron.bridge.training.config.rules.values import default_of, value_of
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.config import yaml_text

_TABLES = yaml_text.tables_beside(__file__)
EXCLUSIONS = {(first, second): way_out for first, second, way_out in _TABLES["exclusions"]}
NEEDS, NEEDS_BY_PREFIX = (
    {key: needed for needed, keys in _TABLES[table].items() for key in keys} for table in ("settings_of", "prefixes_of")
)


def settings_do_not_exclude_each_other(config: RunConfig, world_size: int) -> Iterator[str]:
    """Of some pairs of settings, such as ``model.bf16`` and ``model.fp16``, at most one may be set."""
    for keys, way_out in EXCLUSIONS.items():
        values = [value_of(config, key) for key in keys]
        # a fraction or a number of samples counts as given even if it is 0
        if values[1] and values[0] is not None and values[0] is not False:
            first, second = (f"{key}={value}" for key, value in zip(keys, values, strict=True))
            yield f"{first} and {second} exclude each other: {way_out}"


def settings_have_effect(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of a feature that is off would be ignored."""
    for key, needed in (*NEEDS.items(), *_of_features(config)):
        if value_of(config, key) != default_of(config, key) and not any(
            _has(config, choice) for choice in needed.split(" or ")
        ):
            yield f"{key}={value_of(config, key)} has no effect without {needed}: set that, too, or remove it"


def _of_features(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The settings of ``NEEDS_BY_PREFIX``, each by its longest prefix."""
    for block in ("model", "optimizer", "ddp"):
        for entry in dataclasses.fields(getattr(config, block)):
            key = f"{block}.{entry.name}"
            prefix = max((start for start in NEEDS_BY_PREFIX if key.startswith(start)), key=len, default=None)
            if prefix is not None and key != NEEDS_BY_PREFIX[prefix].partition("=")[0]:
                yield key, NEEDS_BY_PREFIX[prefix]


def _has(config: RunConfig, needed: str) -> bool:
    key, _, wanted = needed.partition("=")
    found = value_of(config, key)
    return found == wanted if wanted else bool(found) and found != "none"
