# SPDX-License-Identifier: Apache-2.0
"""Legal ranges of numeric fields, declared next to the fields.

A field of our own has its range in its annotation: ``interval: Annotated[int, Range(least=1)] = 20``. The ranges of
fields that a class of Megatron-Core declares are in a table of the class that inherits from it, ``INHERITED_RANGES``.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from megatron.bridge.utils.config.serialize import config_fields


@dataclass(frozen=True)
class Range:
    """Legal values of a number.

    Attributes:
        least: The lower bound, which is legal itself.
        most: The upper bound, which is legal itself.
        above: The lower bound, which is not legal itself.
        below: The upper bound, which is not legal itself.
        meaning: What a bound stands for, such as ``a year``, or what else is legal, for messages.
        of_items: The range is also that of each number in a list. Other lists are patterns.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    meaning: str = ""
    of_items: bool = False

    @property
    def rule(self) -> str:
        """The range in words, after "must".

        Example:
            >>> Range(above=0, most=525600, meaning="a year").rule
            'be above 0 and at most 525600, a year'
        """
        if (self.least, self.below) == (0, 1):
            return "lie in [0, 1)"
        bounds = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        finite = [f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound)]
        return ", ".join(filter(None, ["be " + " and ".join(finite), self.meaning]))

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def refusal(self, key: str, value: Any) -> str | None:
        """Return a sentence if ``value`` of the setting ``key`` is a number, or has one, out of this range."""
        if all(number in self for number in self._numbers(value)):
            return None
        return f"{key}={value}: must {self.rule}"

    def _numbers(self, value: Any) -> list[float]:
        """Return the finite numbers of a setting; another rule refuses NaN and infinity, unless it is a default."""
        items = (value or ()) if self.of_items else [value]
        numbers = [
            item for item in items if isinstance(item, int | float) and not isinstance(item, bool)
        ]
        return [number for number in numbers if math.isfinite(number)]


AT_LEAST_ZERO = Range(least=0)
AT_LEAST_ONE = Range(least=1)
ABOVE_ZERO = Range(above=0)
BELOW_ONE = Range(least=0, below=1)
"""Probabilities of dropout, and averages that forget."""
FRACTION = Range(least=0, most=1)
COUNT = Range(least=0, most=10_000)
"""Each is built or planned separately."""
WORKERS = Range(least=0, most=1024)
MINUTES = Range(above=0, most=525_600, meaning="a year")
FINITE = "must be a finite number"

SEED = Range(least=0, most=2**32 - 2**20)
"""Ranks and stages count on from a seed, and numpy's seeds end at 2**32."""


def numbers_in(value: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield the numbers of a config or of a value in one, with their keys, unless they are a field's default.

    Example:
        >>> list(numbers_in({"factor": 8.0, "short": [1, True]}, "rope"))
        [('rope.factor', 8.0), ('rope.short[0]', 1)]
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in cast(Mapping[Any, Any], value).items():
            yield from numbers_in(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast(Sequence[Any], value)):
            yield from numbers_in(item, f"{key}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in config_fields(value):
            item = getattr(value, entry.name)
            is_default = isinstance(item, int | float) and item == entry.default
            if not is_default:
                yield from numbers_in(item, f"{key}.{entry.name}" if key else entry.name)


def infinite_numbers(config: Any) -> list[str]:
    """Return ``key=value`` of each number of a config that is NaN or infinite, and no default."""
    return [f"{key}={value}" for key, value in numbers_in(config) if not math.isfinite(value)]


def out_of_range(config: Any, skipped: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence for each number of a dataclass that is not finite, or out of the range of its field.

    Args:
        config: An instance of the dataclass.
        skipped: Names of fields that may be out of their ranges.
    """
    for setting in infinite_numbers(config):
        yield f"{setting}: {FINITE}"
    for name, allowed in ranges_of(cast(type[Any], type(config))).items():
        value = getattr(config, name)
        refusal = allowed.refusal(name, value)
        if refusal and name not in skipped:
            yield refusal


def range_of(kind: type[Any], name: str) -> Range | None:
    """Return the range of the field ``name`` of a dataclass; None if any value of its type is legal."""
    for base in kind.__mro__:
        metadata = getattr(vars(base).get("__annotations__", {}).get(name), "__metadata__", ())
        for entry in metadata:
            if isinstance(entry, Range):
                return entry
        inherited = vars(base).get("INHERITED_RANGES", {})
        if name in inherited:
            return inherited[name]
    return None


@functools.cache
def ranges_of(kind: type[Any]) -> dict[str, Range]:
    """Return the ranges of all fields of a dataclass that have one, by name."""
    ranges = {entry.name: range_of(kind, entry.name) for entry in dataclasses.fields(kind)}
    return {name: allowed for name, allowed in ranges.items() if allowed is not None}
