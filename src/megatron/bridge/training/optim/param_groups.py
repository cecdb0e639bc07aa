# SPDX-License-Identifier: Apache-2.0
"""Parameter groups with their own hyperparameters: ``optimizer.overrides`` on top of Megatron-Core's rules."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from megatron.core.optimizer import OptimizerConfig, ParamKey, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from megatron.bridge.training.config.blocks.optimizer import ParameterOverride
from megatron.bridge.training.initialize.freezing import check_patterns, named_parameters
from megatron.bridge.utils.errors import UserError


def config_overrides(config: OptimizerConfig, chunks: Sequence[MegatronModule]) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron-Core's overrides for a config: its standard rules, then ``overrides``, which take precedence.

    By default, biases and all other vectors have no weight decay (except the norms of queries and keys with
    ``apply_wd_to_qk_layernorm``), and the embedding and the output layer have ``decoupled_lr``.
    """
    entries: list[ParameterOverride] = getattr(config, "overrides", [])
    named = [item for item in named_parameters(unwrap_model(list(chunks))) if item[1].requires_grad]
    patterns = (pattern for entry in entries for pattern in entry.params)
    check_patterns("optimizer.overrides", patterns, [name for name, _ in named])
    groups: dict[tuple[tuple[str, float], ...], set[int]] = {}
    standard = get_standard_config_overrides(config)
    for name, parameter in named:
        own: dict[str, Any] = {}
        for key, override in standard.items():
            own |= override if key.matches(parameter, name) else {}
        own |= _override_of(config, entries, name)
        groups.setdefault(tuple(sorted(own.items())), set()).add(id(parameter))
    return {
        _exact_key(str(group), ids): cast(ParamGroupOverride, dict(group)) for group, ids in groups.items() if group
    }


def _exact_key(name: str, ids: set[int]) -> ParamKey:
    """A key for exactly these parameters: each has one override, so Megatron-Core has nothing to merge."""
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name, lambda parameter, _: id(parameter) in ids))


def _override_of(config: OptimizerConfig, entries: list[ParameterOverride], name: str) -> dict[str, float]:
    own: dict[str, float] = {}
    for entry in entries:
        if not any(fnmatchcase(name, pattern) for pattern in entry.params):
            continue
        for key, value in dict(_megatron_values(config, entry)).items():
            if own.setdefault(key, value) != value:
                raise UserError(
                    f"optimizer.overrides: two entries match {name} and set {key} to {own[key]} and {value}: make "
                    "their patterns narrower"
                )
    return own


def _megatron_values(config: OptimizerConfig, entry: ParameterOverride) -> Iterator[tuple[str, float]]:
    assert config.lr is not None, "the config is not resolved"
    peak, end = entry.rates(config.lr, config.min_lr or 0.0)
    if entry.lr is not None or entry.lr_mult is not None:
        yield "max_lr", peak
    if entry.min_lr is not None or entry.lr_mult is not None:
        yield "min_lr", end
    if entry.weight_decay is not None:
        yield from (("start_wd", entry.weight_decay), ("end_wd", entry.weight_decay), ("wd_mult", 1.0))
    if entry.wd_mult is not None:
        yield "wd_mult", entry.wd_mult
