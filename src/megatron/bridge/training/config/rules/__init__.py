# SPDX-License-Identifier: Apache-2.0
"""Cross-field rules, checked before anything is built. All problems are reported together.

A rule is a public generator function in a module of this package. It takes the config and the number of processes,
and yields a sentence for each problem: the key, its value, the rule and the nearest legal values.
"""

from collections.abc import Callable, Iterable, Iterator
from inspect import isgeneratorfunction
from types import ModuleType

from megatron.bridge.training.config.rules import (
    checkpoint,
    context_sharing,
    experts,
    fields,
    idle_settings,
    layout,
    machine,
    model,
    objectives,
    optimizers,
    performance,
    related_settings,
    schedule,
    sharding,
    stages,
)
from megatron.bridge.training.config.run_config import RunConfig

Rule = Callable[[RunConfig, int], Iterator[str]]


def _rules_of(modules: Iterable[ModuleType]) -> Iterator[Rule]:
    for module in modules:
        for name, member in vars(module).items():
            is_own = getattr(member, "__module__", None) == module.__name__
            if is_own and isgeneratorfunction(member) and not name.startswith("_"):
                yield member


# Everything after these divides by sizes.
SIZE_RULES: tuple[Rule, ...] = (
    layout.sizes_are_positive,
    fields.numbers_are_finite,
    fields.sizes_are_in_range,
    model.hybrid_pattern_is_valid,
    layout.world_size_fits_layout,
    fields.unavailable_settings_are_unset,
    schedule.rampup_reaches_global_batch_size,
    schedule.epochs_can_be_counted,
)

# What this machine must have; not asked of a config that is validated for another one.
LOCAL_RULES: tuple[Rule, ...] = tuple(_rules_of([machine]))

_MODULES = (
    *(fields, layout, context_sharing, stages, experts, model, optimizers, schedule, objectives),
    *(performance, sharding, checkpoint, related_settings, idle_settings),
)
RULES: tuple[Rule, ...] = tuple(rule for rule in _rules_of(_MODULES) if rule not in SIZE_RULES)

# Rules that read the vocabulary size, which may come from the tokenizer.
VOCABULARY_RULES: tuple[Rule, ...] = (
    layout.tp_divides_vocabulary,
    objectives.distill_settings_are_valid,
)


def violations(rules: Iterable[Rule], config: RunConfig, world_size: int) -> list[str]:
    """A sentence for each problem that one of ``rules`` finds in ``config``."""
    return [sentence for rule in rules for sentence in rule(config, world_size)]
