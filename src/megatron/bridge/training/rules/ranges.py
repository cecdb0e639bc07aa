# SPDX-License-Identifier: Apache-2.0
"""Rules on how large a number may be."""

import dataclasses
import math
from typing import Any

from megatron.bridge.training.config import ConfigContainer

# ranks and stages count on from a seed, and numpy's end at 2**32
_LARGEST_SEED = 2**32 - 2**20

# setting -> its least and its largest value
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        (
            *("model.num_query_groups", "model.kv_channels", "model.ffn_hidden_size", "model.vocab_size"),
            *("model.make_vocab_size_divisible_by", "model.recompute_num_layers", "model.moe_layer_freq"),
            *("model.moe_ffn_hidden_size", "model.expert_tensor_parallel_size", "tokenizer.vocab_size"),
            "ddp.suggested_communication_unit_size",
        ),
        (1, math.inf),
    ),
    **dict.fromkeys(
        (
            *("model.layernorm_epsilon", "model.init_method_std", "model.mtp_num_layers", "optimizer.adam_eps"),
            "model.moe_aux_loss_coeff",
        ),
        (0, math.inf),
    ),
    "model.rotary_percent": (0, 1),
    "rng.seed": (-math.inf, _LARGEST_SEED),  # below zero is a matter of another rule
    "dataset.random_seed": (0, _LARGEST_SEED),
    "dataset.seed": (0, _LARGEST_SEED),
}
# zero is no scale and no base
ABOVE_ZERO = (
    *("model.rotary_base", "model.rope_scaling_factor", "model.moe_expert_capacity_factor"),
    *("optimizer.loss_scale", "optimizer.initial_loss_scale", "peft.alpha"),
)


def numbers_are_finite(config: ConfigContainer, world_size: int) -> str | None:
    """NaN and infinity spread to every weight."""
    blocks = ((key, block) for key, block in vars(config).items() if dataclasses.is_dataclass(block))
    wrong = [
        f"{key}.{entry.name}={value}"
        for key, block in blocks
        for entry in dataclasses.fields(block)
        if isinstance(value := getattr(block, entry.name), float)
        and not math.isfinite(value)
        and value != entry.default
    ]
    return f"{', '.join(wrong)}: must be a finite number" if wrong else None


def numbers_are_in_range(config: ConfigContainer, world_size: int) -> str | None:
    """Megatron-Core computes with what it gets: divisions by zero, or weights of NaN."""
    wrong: list[str] = []
    for key, (least, largest) in RANGES.items():
        value = _number(config, key)
        if value is not None and not least <= value <= largest:
            bounds = {f"at least {least}": least, f"at most {largest}": largest}
            rule = " and ".join(words for words, bound in bounds.items() if math.isfinite(bound))
            wrong.append(f"{key}={value}: must be {rule}")
    for key in ABOVE_ZERO:
        value = _number(config, key)
        if value is not None and value <= 0:
            wrong.append(f"{key}={value}: must be above 0")
    return "; ".join(wrong) or None


def _number(config: ConfigContainer, key: str) -> Any:
    """The value, if the setting exists and is one number; NaN is a matter of its own."""
    block, _, name = key.partition(".")
    value = getattr(getattr(config, block), name, None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return value if is_number else None
