# SPDX-License-Identifier: Apache-2.0
"""Notes on numbers outside the range of published training runs: legal, but usually a typing mistake."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.bridge.training.config.rules.values import value_of
from megatron.bridge.training.config.run_config import RunConfig


@dataclass(frozen=True)
class UsualRange:
    """The smallest and the largest usual value of a setting."""

    least: float
    most: float

    def scaled_by(self, factor: float) -> "UsualRange":
        return UsualRange(self.least * factor, self.most * factor)


# What GPT-3, Llama, Qwen, DeepSeek-V3, OLMo 2, SmolLM2 and guides to fine-tuning use, and three to ten times as much or
# as little.
USUAL = {
    "optimizer.weight_decay": UsualRange(0.0, 0.5),
    "optimizer.adam_beta1": UsualRange(0.5, 0.99),
    "optimizer.adam_beta2": UsualRange(0.9, 0.9999),
    "optimizer.adam_eps": UsualRange(1e-16, 1e-4),
    "optimizer.clip_grad": UsualRange(0.0, 100.0),
    "model.init_method_std": UsualRange(1e-4, 0.2),
    "model.embedding_init_method_std": UsualRange(1e-4, 2.0),
    "model.layernorm_epsilon": UsualRange(1e-12, 1e-3),
    "model.rotary_base": UsualRange(1e2, 1e12),  # Falcon-H1 has 1e11
    "model.hidden_dropout": UsualRange(0.0, 0.5),
    "model.attention_dropout": UsualRange(0.0, 0.5),
    "model.moe_aux_loss_coeff": UsualRange(0.0, 0.5),
    "model.moe_z_loss_coeff": UsualRange(0.0, 0.1),
    "model.mtp_loss_scaling_factor": UsualRange(0.0, 1.0),
    "peft.alpha": UsualRange(0.1, 2048.0),
    "peft.dropout": UsualRange(0.0, 0.5),
    "distill.temperature": UsualRange(0.1, 20.0),
}
ADAM_LR = UsualRange(1e-8, 2e-2)
OTHER_LR = UsualRange(1e-8, 1.0)
"""``optimizer.lr`` of Muon and SGD, which do not divide a gradient by its size."""
SOFTMAX_SCALE = UsualRange(0.05, 20.0)
"""``model.softmax_scale`` in units of 1 / sqrt(width of a head)."""


def unusual_numbers(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each number that few runs have."""
    uses_adam = value_of(config, "optimizer.optimizer") == "adam"
    usual_ranges = {**USUAL, "optimizer.lr": ADAM_LR if uses_adam else OTHER_LR}
    if head_width := value_of(config, "model.kv_channels"):
        usual_ranges["model.softmax_scale"] = SOFTMAX_SCALE.scaled_by(head_width**-0.5)
    values = {key: value_of(config, key) for key in usual_ranges}
    for key, rate in _further_rates(config):
        usual_ranges[key], values[key] = usual_ranges["optimizer.lr"], rate
    for key, usual in usual_ranges.items():
        if _is_unusual(values[key], usual):
            yield (
                f"{key}={values[key]} is unusual: it usually lies between {usual.least:g} and {usual.most:g}"
            )


def _further_rates(config: RunConfig) -> Iterator[tuple[str, float]]:
    """Yield the learning rates of some parameters, unless they are 0, which freezes them."""
    optimizer = config.optimizer
    if optimizer.decoupled_lr:
        yield "optimizer.decoupled_lr", optimizer.decoupled_lr
    for index, override in enumerate(optimizer.overrides):
        rate, _ = override.rates(optimizer.lr or 0.0, optimizer.min_lr or 0.0)
        if rate and (override.lr is not None or override.lr_mult is not None):
            yield f"optimizer.overrides[{index}].lr", rate


def _is_unusual(value: Any, usual: UsualRange) -> bool:
    return isinstance(value, int | float) and not usual.least <= value <= usual.most
