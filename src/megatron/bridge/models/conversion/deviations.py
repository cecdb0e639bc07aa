# SPDX-License-Identifier: Apache-2.0
"""Where a bridged model differs from transformers' own code on purpose: the notes at loading, the docs, and the tests.

Everything else is transformers' to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Deviation:
    """One difference."""

    name: str
    models: str
    """Architectures that it concerns, for readers."""
    here: str
    """What a bridged model computes."""
    in_transformers: str
    """What transformers computes."""
    applies: Callable[[Any], bool]
    """Whether it concerns the model of a Hugging Face config."""
    in_training_only: bool = False
    """Whether logits and generated tokens are the same."""
    is_noted: bool = True
    """Whether loading a model says so."""

    def note(self) -> str:
        """Return the sentence that a user reads when a model is loaded."""
        return f"{self.here}; in transformers, {self.in_transformers}"


def _rotates_long_texts(config: Any) -> bool:
    if not _is_model_type(config, "phimoe"):
        return False
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters.get("rope_type") == "longrope"


def _adds_noise(config: Any) -> bool:
    return _is_model_type(config, "phimoe") and bool(getattr(config, "input_jitter_noise", 0))


def _balances_experts(config: Any) -> bool:
    coefficients = (getattr(config, key, 0) for key in ("router_aux_loss_coef", "aux_loss_alpha"))
    return any(coefficients)


def _is_model_type(config: Any, model_type: str) -> bool:
    return getattr(config, "model_type", None) == model_type


DEVIATIONS = (
    Deviation(
        "long texts of Phi-3.5-MoE",
        "`PhimoeForCausalLM`",
        "texts longer than original_max_position_embeddings are rotated with long_factor, as in the published code",
        "they are rotated with short_factor",
        _rotates_long_texts,
    ),
    Deviation(
        "noise of Phi-3.5-MoE",
        "`PhimoeForCausalLM`",
        "no noise is added to the inputs of experts (input_jitter_noise)",
        "training adds it",
        _adds_noise,
        in_training_only=True,
    ),
    Deviation(
        "losses of routers",
        "mixtures of experts with `router_aux_loss_coef` or `aux_loss_alpha`",
        "training adds the load balancing loss, of each layer for itself",
        "it is added if the router logits are requested, over all layers together, or not at all",
        _balances_experts,
        in_training_only=True,
        is_noted=False,  # of nearly all mixtures of experts, and a run logs these losses
    ),
)


def deviations_of(config: Any) -> list[Deviation]:
    """Return the deviations that concern the model of a Hugging Face config, of its text part if it has images."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [deviation for deviation in DEVIATIONS if deviation.applies(text)]
