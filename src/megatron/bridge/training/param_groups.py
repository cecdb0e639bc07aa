# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Parameters that learn otherwise than the rest: ``optimizer.overrides``, over Megatron-Core's own conditions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, cast

from megatron.core.optimizer import OptimizerConfig, ParamKey, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from megatron.bridge.training.freezing import named_parameters
from megatron.bridge.utils.dist import all_gather_object, is_initialized
from megatron.bridge.utils.errors import UserError, did_you_mean


@dataclass
class ParameterOverride:
    """What some parameters have of their own; what is None is as for all.

    Attributes:
        params: Patterns of the parameters, such as ``embedding.*`` or ``*.router.weight``: Megatron's names,
            ``*`` for any characters, layers counted through all stages.
        lr: Peak of the learning rate, on the common schedule.
        min_lr: Where it ends.
        lr_mult: Both as multiples of the common ones, instead.
        weight_decay: Weight decay, constant; it counts for biases and norms, too, if they are named.
        wd_mult: A multiple of the common weight decay, instead.
    """

    params: list[str] = field(default_factory=list[str])
    lr: float | None = None
    min_lr: float | None = None
    lr_mult: float | None = None
    weight_decay: float | None = None
    wd_mult: float | None = None

    def values(self) -> dict[str, float]:
        """What is set, by field."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "params"}
        return {name: value for name, value in found.items() if value is not None}

    def rates(self, lr: float, min_lr: float) -> tuple[float, float]:
        """The learning rates that come of the common ones: peak and end."""
        factor = 1.0 if self.lr_mult is None else self.lr_mult
        return (
            lr * factor if self.lr is None else self.lr,
            min_lr * factor if self.min_lr is None else self.min_lr,
        )


def config_overrides(
    config: OptimizerConfig, chunks: Sequence[MegatronModule]
) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron-Core's overrides of a config: its own conditions, then ``overrides``, which go before them.

    By themselves biases and all vectors have no weight decay (``apply_wd_to_qk_layernorm`` takes the norms of
    queries and keys out of that), and embedding and output layer have ``decoupled_lr``.

    Raises:
        UserError: a pattern names no parameter that is trained on any rank, or two entries set the same for one.
    """
    entries: list[ParameterOverride] = getattr(config, "overrides", [])
    named = [item for item in named_parameters(unwrap_model(list(chunks))) if item[1].requires_grad]
    _check_patterns(entries, [name for name, _ in named])
    groups: dict[tuple[tuple[str, float], ...], set[int]] = {}
    standard = get_standard_config_overrides(config)
    for name, parameter in named:
        own: dict[str, Any] = {}
        for key, override in standard.items():
            own |= override if key.matches(parameter, name) else {}
        own |= _merged(config, entries, name)
        groups.setdefault(tuple(sorted(own.items())), set()).add(id(parameter))
    return {
        _members(str(group), ids): cast(ParamGroupOverride, dict(group)) for group, ids in groups.items() if group
    }


def _members(name: str, ids: set[int]) -> ParamKey:
    """Exactly these parameters: each has one override, so that Megatron-Core has none to reconcile."""
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name, lambda parameter, _: id(parameter) in ids))


def _merged(config: OptimizerConfig, entries: list[ParameterOverride], name: str) -> dict[str, float]:
    own: dict[str, float] = {}
    for entry in entries:
        if not any(fnmatchcase(name, pattern) for pattern in entry.params):
            continue
        for key, value in dict(_core_values(config, entry)).items():
            if own.setdefault(key, value) != value:
                raise UserError(
                    f"optimizer.overrides: two entries name {name} and give {key} as {own[key]} and {value}: make "
                    "their patterns narrower"
                )
    return own


def _core_values(config: OptimizerConfig, entry: ParameterOverride) -> Iterator[tuple[str, float]]:
    """An entry under Megatron-Core's names."""
    assert config.lr is not None, "the config is not validated"
    peak, end = entry.rates(config.lr, config.min_lr or 0.0)
    if entry.lr is not None or entry.lr_mult is not None:
        yield "max_lr", peak
    if entry.min_lr is not None or entry.lr_mult is not None:
        yield "min_lr", end
    if entry.weight_decay is not None:
        yield from (("start_wd", entry.weight_decay), ("end_wd", entry.weight_decay), ("wd_mult", 1.0))
    if entry.wd_mult is not None:
        yield "wd_mult", entry.wd_mult


def _check_patterns(entries: list[ParameterOverride], mine: list[str]) -> None:
    found = all_gather_object(mine) if is_initialized() else [mine]
    names = sorted({name for part in found for name in part})
    for pattern in (pattern for entry in entries for pattern in entry.params):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"optimizer.overrides: the pattern {pattern} names no parameter that is trained"
                f"{did_you_mean(pattern, names)}"
            )
