# SPDX-License-Identifier: Apache-2.0
"""Notes on numbers outside the range of published training runs: legal, but usually a slip of the keyboard."""

from collections.abc import Iterator
from typing import Any

from megatron.bridge.training.config.rules.values import value_of
from megatron.bridge.training.config.run_config import RunConfig

# What GPT-3, Llama, Qwen, DeepSeek-V3, OLMo 2, SmolLM2 and guides to fine-tuning use, and three to ten times as
# much or as little.
USUAL: dict[str, tuple[float, float]] = {
    "optimizer.weight_decay": (0.0, 0.5),
    "optimizer.adam_beta1": (0.5, 0.99),
    "optimizer.adam_beta2": (0.9, 0.9999),
    "optimizer.adam_eps": (1e-16, 1e-4),
    "optimizer.clip_grad": (0.0, 100.0),
    "model.init_method_std": (1e-4, 0.2),
    "model.layernorm_epsilon": (1e-12, 1e-3),
    "model.rotary_base": (1e2, 1e12),  # Falcon-H1 has 1e11
    "model.hidden_dropout": (0.0, 0.5),
    "model.attention_dropout": (0.0, 0.5),
    "model.moe_aux_loss_coeff": (0.0, 0.5),
    "model.moe_z_loss_coeff": (0.0, 0.1),
    "model.mtp_loss_scaling_factor": (0.0, 1.0),
    "peft.alpha": (0.1, 2048.0),
    "peft.dropout": (0.0, 0.5),
    "distill.temperature": (0.1, 20.0),
}
ADAM_LR = (1e-8, 2e-2)
OTHER_LR = (1e-8, 1.0)  # ``optimizer.lr`` of Muon and SGD, which do not divide a gradient by its size
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
