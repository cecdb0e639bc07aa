# SPDX-License-Identifier: Apache-2.0
"""The optimizer, and parameter groups with their own settings."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig

from megatron.bridge.models.hf_pretrained.causal_lm import to_dtype
from megatron.bridge.training.config.blocks.core_ranges import OPTIMIZER_RANGES
from megatron.bridge.utils.config.ranges import Range

# Tensors that an optimizer keeps for each parameter.
STATE_NAMES: dict[str, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
    "lion": ("exp_avg",),
}


@dataclass
class ParameterOverride:
    """Settings of some parameters. A field that is None keeps the common value."""

    params: list[str] = field(default_factory=list[str])
    """Patterns of the parameters, such as ``embedding.*`` or ``*.router.weight``: Megatron's names, ``*`` for any
    characters, layers numbered over all pipeline stages.
    """
    lr: float | None = None
    """Peak learning rate, on the common schedule."""
    min_lr: float | None = None
    """Final learning rate."""
    lr_mult: float | None = None
    """Multiplies the common peak and final learning rates. Excludes ``lr`` and ``min_lr``."""
    weight_decay: float | None = None
    """Constant weight decay. It also applies to biases and norms that ``params`` names."""
    wd_mult: float | None = None
    """Multiplies the common weight decay. Excludes ``weight_decay``."""

    def values(self) -> dict[str, float]:
        all_values = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name != "params"
        }
        return {name: value for name, value in all_values.items() if value is not None}

    def rates(self, lr: float, min_lr: float) -> tuple[float, float]:
        """Peak and final learning rate, given the common ones."""
        factor = 1.0 if self.lr_mult is None else self.lr_mult
        return (
            lr * factor if self.lr is None else self.lr,
            min_lr * factor if self.min_lr is None else self.min_lr,
        )


@dataclass
class OptimizerConfig(CoreOptimizerConfig):
    """Megatron-Core's optimizer settings. The fields below that are None are derived."""

    INHERITED_RANGES: ClassVar[dict[str, Range]] = OPTIMIZER_RANGES

    overrides: list[ParameterOverride] = field(default_factory=list[ParameterOverride])
    """Parameter groups with their own learning rate or weight decay."""
    muon_tp_mode: str = "duplicated"
    """``duplicated`` and ``distributed`` compute the same update as one process. ``blockwise``, Megatron-Core's
    default, orthogonalizes each tensor-parallel shard separately, which is a different optimizer.
    """
    use_distributed_optimizer: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """None shards the optimizer state if the optimizer is Adam and there is more than one data-parallel rank: with
    one rank, sharding only costs time.
    """
    overlap_param_gather: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """None copies ``ddp.overlap_param_gather``."""
    bf16: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """None takes it from ``mixed_precision``, or from the model if that is not set."""
    fp16: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """None takes it from ``mixed_precision``, or from the model if that is not set."""
    params_dtype: Any = None
    """None takes it from ``mixed_precision``, or from the model if that is not set."""

    def __post_init__(self) -> None:
        """Accept the names of dtypes; what Megatron-Core derives needs to know who shards the state."""
        for name in (
            "params_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "main_params_dtype",
            "main_grads_dtype",
        ):
            setattr(self, name, to_dtype(getattr(self, name)))
        if not self.use_precision_aware_optimizer or self.use_distributed_optimizer:
            super().__post_init__()
