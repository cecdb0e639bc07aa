# SPDX-License-Identifier: Apache-2.0
"""Find mistakes in overrides before torch and Megatron-Core are imported, which takes three seconds.

Only blocks that need no model are checked here, and only mistakes that are certain are refused. ``apply_layers`` checks
every override again, on the config of the recipe.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from megatron.bridge.data.tokenizer import TokenizerConfig
from megatron.bridge.training.config.blocks.checkpoint import CheckpointConfig
from megatron.bridge.training.config.blocks.logger import LoggerConfig, ProfilingConfig
from megatron.bridge.training.config.blocks.train import (
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.config.ranges import EARLY_RANGES
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.keys import OTHER_NAMES, dotted_keys
from megatron.bridge.utils.config.overrides import Layer, apply_layers
from megatron.bridge.utils.errors import UserError, misspelling, refuse


@dataclass
class EarlyConfig:
    """The blocks of ``RunConfig`` whose modules import no torch."""

    train: TrainingConfig = field(default_factory=TrainingConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    profiling: ProfilingConfig | None = field(default_factory=ProfilingConfig)


_KEYS = frozenset(dotted_keys(EarlyConfig()))


def check_early(layers: Iterable[Layer]) -> None:
    """Refuse settings of ``EarlyConfig`` that do not exist or have a wrong type, and numbers that are out of range.

    If one of the settings needs the whole config, nothing is refused, so that all mistakes are reported together.
    """
    layers = list(layers)
    problems = dict[str, str | None]()
    for layer in layers:
        for key, value in _settings(layer):
            is_number = key in EARLY_RANGES and isinstance(value, int | float)
            problems[key] = EARLY_RANGES[key].refusal(key, value) if is_number else None
            if not problems[key] and key and not (_is_known(key) and _is_plain(value)):
                return
    apply_layers(
        EarlyConfig(),
        [replace(layer, overrides=[*filter(_is_of_blocks, layer.overrides)]) for layer in layers],
    )
    refuse(filter(None, problems.values()))


def _settings(layer: Layer) -> Iterator[tuple[str, Any]]:
    """Yield keys and values; the key is empty if no config accepts the override."""
    for block, members in layer.values.items():
        for name, value in (
            cast(dict[str, Any], members).items() if isinstance(members, dict) else [("", members)]
        ):
            yield f"{block}.{name}", value
    for item in layer.overrides:
        key, equals, text = item.partition("=")
        try:
            yield (key.strip() if equals else ""), yaml_text.read(text.strip(), key)
        except UserError:
            yield "", None


def _is_of_blocks(item: str) -> bool:
    key = item.partition("=")[0].strip()
    return key not in EARLY_RANGES or key in _KEYS


def _is_known(key: str) -> bool:
    """Return whether ``key`` is a key of ``EarlyConfig`` or a misspelling of one."""
    block, _, name = key.rpartition(".")
    is_foreign = (not block or block in _KEYS) and name in OTHER_NAMES
    is_slip = f"{block}{name}".isidentifier() and misspelling(key, _KEYS)
    return key in _KEYS or is_foreign or bool(is_slip)


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` refers to no other value and names no class."""
    return not isinstance(value, dict) and "${" not in str(value)
