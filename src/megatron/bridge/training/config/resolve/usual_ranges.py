# SPDX-License-Identifier: Apache-2.0
"""Notes on numbers outside the range of published training runs: legal, but usually a slip of the keyboard."""

from collections.abc import Iterator
from typing import Any

from megatron.bridge.training.config.rules.values import value_of
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.config import yaml_text

USUAL = yaml_text.tables_beside(__file__)
ADAM_LR = (1e-8, 2e-2)
OTHER_LR = (
    1e-8,
    1.0,
)  # ``optimizer.lr`` of Muon and SGD, which do not divide a gradient by its size
SOFTMAX_SCALE = (0.05, 20.0)  # ``model.softmax_scale`` in units of 1 / sqrt(width of a head)


def unusual_numbers(config: RunConfig) -> Iterator[str]:
    """A sentence for each number that few runs have."""
    adam = value_of(config, "optimizer.optimizer") == "adam"
    for key, usual in {**USUAL, "optimizer.lr": ADAM_LR if adam else OTHER_LR}.items():
        yield from _unusual(key, value_of(config, key), *usual)
    if width := value_of(config, "model.kv_channels"):
        usual = [bound * width**-0.5 for bound in SOFTMAX_SCALE]
        yield from _unusual("model.softmax_scale", value_of(config, "model.softmax_scale"), *usual)


def _unusual(key: str, value: Any, least: float, most: float) -> Iterator[str]:
    if isinstance(value, int | float) and not least <= value <= most:
        yield f"{key}={value} is unusual: it usually lies between {least:g} and {most:g}"
