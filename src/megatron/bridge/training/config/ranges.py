# SPDX-License-Identifier: Apache-2.0
"""Legal ranges of numeric settings."""

import math
from dataclasses import dataclass
from typing import Any

from megatron.bridge.utils.config import yaml_text


@dataclass(frozen=True)
class Range:
    """Legal values of a setting."""

    rule: str  # the range in words, after "must"
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf  # an open lower bound
    below: float = math.inf  # an open upper bound

    def __contains__(self, value: float) -> bool:
        below = value < self.below or math.isinf(self.below)  # infinity itself may mean "no limit"
        return self.least <= value <= self.most and self.above < value and below


BELOW_ONE = Range("lie in [0, 1)", least=0, below=1)
ELEMENTWISE = ("train.iterations_to_skip", "model.window_size")
"""Lists of numbers; other lists are patterns, such as ``model.moe_layer_freq``."""
RANGES = {
    key: Range(rule, **row["bounds"])
    for rule, row in yaml_text.tables_beside(__file__).items()
    for key in row["settings"]
}


def out_of_range(key: str, value: Any) -> str | None:
    """Return a sentence if ``value`` is a number, or has one, that ``key`` must not have."""
    allowed = RANGES[key]
    wrong = any(number not in allowed for number in _numbers(key, value))
    return f"{key}={value}: must {allowed.rule}" if wrong else None


def _numbers(key: str, value: Any) -> list[float]:
    """The numbers of a setting, if it has any; another rule refuses NaN."""
    values = (value or ()) if key in ELEMENTWISE else [value]
    numbers = [
        item for item in values if isinstance(item, int | float) and not isinstance(item, bool)
    ]
    return [number for number in numbers if not math.isnan(number)]
