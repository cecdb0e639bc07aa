# SPDX-License-Identifier: Apache-2.0
"""Rules on settings that need or exclude each other."""

import dataclasses
import re
from collections.abc import Iterator

from megatron.bridge.training.config.rules.values import default_of, value_of
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.config import yaml_text

_TABLES = yaml_text.tables_beside(__file__)
REQUIREMENTS: list[tuple[str, str, str]] = _TABLES["requirements"]
_SIGN = re.compile(" ?(!=|=|>) ?")
EXCLUSIONS = {(first, second): way_out for first, second, way_out in _TABLES["exclusions"]}
NEEDS, NEEDS_BY_PREFIX = (
    {key: needed for needed, keys in _TABLES[table].items() for key in keys}
    for table in ("settings_of", "prefixes_of")
)


def settings_do_not_exclude_each_other(config: RunConfig, world_size: int) -> Iterator[str]:
    """Of some pairs of settings, such as ``model.bf16`` and ``model.fp16``, at most one may be set."""
    for keys, way_out in EXCLUSIONS.items():
        values = [value_of(config, key) for key in keys]
        # a fraction or a number of samples counts as given even if it is 0
        if values[1] and values[0] is not None and values[0] is not False:
            first, second = (_shown(config, key) for key in keys)
            yield f"{first} and {second} exclude each other: {way_out}"


def settings_have_what_they_need(config: RunConfig, world_size: int) -> Iterator[str]:
    """Features build on others, such as the distributed optimizer, which must be on, too."""
    for given, needed, way_out in REQUIREMENTS:
        missing = "; ".join(each for each in needed.split("; ") if not _holds(config, each))
        for condition in given.split(" or ") if missing else ():
            if _is_met(config, condition):
                yield f"{_shown(config, _SIGN.split(condition)[0])} needs {missing}: {way_out}"


def settings_have_effect(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of a feature that is off would be ignored."""
    for key, needed in (*NEEDS.items(), *_of_features(config)):
        if value_of(config, key) != default_of(config, key) and not _holds(config, needed):
            yield f"{key}={value_of(config, key)} has no effect without {needed}: set that, too, or remove it"


def _of_features(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The settings of ``NEEDS_BY_PREFIX``, each by its longest prefix."""
    for block in ("model", "optimizer", "ddp"):
        for entry in dataclasses.fields(getattr(config, block)):
            key = f"{block}.{entry.name}"
            prefix = max(
                (start for start in NEEDS_BY_PREFIX if key.startswith(start)), key=len, default=None
            )
            if prefix is not None and key != NEEDS_BY_PREFIX[prefix].partition("=")[0]:
                yield key, NEEDS_BY_PREFIX[prefix]


def _shown(config: RunConfig, key: str) -> str:
    value = value_of(config, key)
    return key if dataclasses.is_dataclass(value) else f"{key}={value}"


def _holds(config: RunConfig, conditions: str) -> bool:
    """Whether one of the conditions, with `` or `` between them, is true."""
    return any(_is_met(config, condition) for condition in conditions.split(" or "))


def _is_met(config: RunConfig, condition: str) -> bool:
    key, *rest = _SIGN.split(condition, maxsplit=1)
    found = value_of(config, key)
    match rest:
        case [">", number]:
            return found is not None and found > float(number)
        case [sign, value]:
            return (str(found) == value) == (sign == "=")
        case _:
            return bool(found) and found != "none"
