# SPDX-License-Identifier: Apache-2.0
"""Values of a config by their dotted keys, and the legal values nearest to an illegal one, for messages."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.bridge.training.config.run_config import RunConfig


def value_of(config: RunConfig, key: str) -> Any:
    """The value of ``block.name``, or of ``block`` itself; None if the block is unset or has no such attribute.

    Unlike ``keys.value_at``, it also reads properties: some data sets compute what others have as a field.
    """
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
    return (
        entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
    )


@functools.cache
def _fields(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    return {entry.name: entry for entry in dataclasses.fields(kind)}


def divisors(value: int) -> list[int]:
    return [size for size in range(1, value + 1) if value % size == 0]


def near(value: int, legal: Iterable[int]) -> str:
    """The legal values next to ``value``.

    Example:
        >>> near(3, [1, 2, 4, 8])
        '2 or 4'
    """
    ordered = sorted(legal)
    below = [size for size in ordered if size < value][-1:]
    above = [size for size in ordered if size > value][:1]
    return " or ".join(str(size) for size in below + above)


def multiple_near(value: int, unit: int) -> str:
    """The multiples of ``unit`` next to ``value``.

    Example:
        >>> multiple_near(10, 4)
        '8 or 12'
    """
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def unmet(setting: str, needs: dict[str, bool]) -> Iterator[str]:
    """A sentence with the ``needs`` of a setting that is on which are not met, if there are any."""
    missing = [need for need, met in needs.items() if not met]
    if missing:
        yield f"{setting} needs {'; '.join(missing)}: or switch it off"


def indivisible(
    key: str, size: int, whole_key: str, whole: int, otherwise: str = ""
) -> Iterator[str]:
    """A sentence if ``size`` does not divide ``whole``; ``otherwise`` is added to the way out.

    Example:
        >>> list(indivisible("parts", 3, "whole", 8))
        ['parts=3 does not divide whole=8: use 2 or 4']
    """
    if whole % size:
        yield f"{key}={size} does not divide {whole_key}={whole}: use {near(size, divisors(whole))}{otherwise}"
