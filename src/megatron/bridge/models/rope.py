# SPDX-License-Identifier: Apache-2.0
"""Scaled rotary embeddings: every kind that transformers computes, with the numbers that transformers computes.

Megatron-Core knows two kinds of scaling and fixes some of their parameters. Here the inverse frequencies and the
attention factor come from transformers' own functions, so a scaled model cannot drift from its reference.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.utils.errors import UserError, did_you_mean

# rope_type -> (keys it needs, keys it may have)
KINDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "proportional": (frozenset(), frozenset({"factor"})),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "factor"}),
    ),
}
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def check_parameters(parameters: dict[str, Any]) -> None:
    """Refuse a ``rope_parameters`` dict that is not understood to the last key.

    Raises:
        UserError: an unknown kind, an unknown key, or a key that the kind needs and that is not there.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in KINDS:
        raise UserError(f"rope_parameters.rope_type={kind!r} is not one of {', '.join(KINDS)}")
    if parameters.get("type", kind) != kind:
        raise UserError(
            f"rope_parameters has rope_type={kind!r} and type={parameters['type']!r}: remove the wrong one"
        )
    required, optional = KINDS[kind]
    known = required | optional | _COMMON
    for key in sorted(set(parameters) - known):
        raise UserError(
            f"rope_parameters.{key} is not a parameter of rope_type={kind!r}{did_you_mean(key, known)}"
        )
    for key in sorted(required):
        if parameters.get(key) is None:
            raise UserError(f"rope_parameters.{key} is missing: rope_type={kind!r} needs it")


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding with the frequencies of one of transformers' scaling rules.

    Args:
        plain: the embedding to replace; layout and process group are taken from it.
        config: the provider that the model was built from; ``rope_parameters`` says which rule.
    """

    def __init__(self, plain: RotaryEmbedding, config: Any) -> None:
        super().__init__(
            kv_channels=config.kv_channels,
            rotary_percent=config.rotary_percent,
            rotary_interleaved=plain.rotary_interleaved,
            rotary_base=cast(int, config.rotary_base),
            use_cpu_initialization=plain.inv_freq.device.type == "cpu",
            cp_group=cast(Any, plain.cp_group),
        )
        self._kind: str = config.rope_parameters["rope_type"]
        self._reference = _reference_config(config)
        device = self.inv_freq.device
        frequencies, self.attention_factor = self._compute(None)
        for name in ("short_factor", "long_factor"):
            factors = config.rope_parameters.get(name)
            if factors is not None and len(factors) != len(frequencies):
                raise UserError(
                    f"rope_parameters.{name} has {len(factors)} numbers, the heads have {len(frequencies)} pairs"
                )
        if frequencies.shape != self.inv_freq.shape:
            raise UserError(
                f"rope_parameters rotates {2 * len(frequencies)} of {config.kv_channels} head dimensions but "
                f"rotary_percent={config.rotary_percent} means {2 * len(self.inv_freq)}: make them agree"
            )
        self.inv_freq = frequencies.to(device)

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles [position, rotated dimension / 2] of ``max_seq_len`` positions from ``offset`` on."""
        positions = torch.arange(offset, offset + max_seq_len, device=self.inv_freq.device, dtype=torch.float32)
        return torch.outer(positions, self._frequencies(max_seq_len + offset))

    def _frequencies(self, length: int) -> torch.Tensor:
        # transformers recomputes these two kinds from the length of the sequence at hand
        if self._kind == "longrope" or (
            self._kind == "dynamic" and length > self._reference.max_position_embeddings
        ):
            return self._compute(length)[0].to(self.inv_freq.device)
        return self.inv_freq

    def _compute(self, length: int | None) -> tuple[torch.Tensor, float]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return ROPE_INIT_FUNCTIONS[self._kind](cast(Any, self._reference), None, seq_len=length)


def apply_rope(model: Any, config: Any) -> None:
    """Give ``model`` (a ``GPTModel``) the scaled rotary embedding that ``config.rope_parameters`` asks for.

    Raises:
        UserError: the parameters are not understood, or another setting would leave them without effect.
    """
    parameters = config.rope_parameters
    if not parameters or parameters.get("rope_type", "default") == "default":
        return
    check_parameters(parameters)
    if config.position_embedding_type != "rope" or config.rope_scaling:
        raise UserError(
            f"rope_parameters.rope_type={parameters['rope_type']!r} has no effect with "
            f"position_embedding_type={config.position_embedding_type!r} and rope_scaling={config.rope_scaling}: "
            "use 'rope' and False, or remove rope_parameters"
        )
    embedding = ScaledRotaryEmbedding(model.rotary_pos_emb, config)
    _set_attention_factor(model, config, embedding.attention_factor)
    model.rotary_pos_emb = embedding


def _set_attention_factor(model: Any, config: TransformerConfig, factor: float) -> None:
    if factor == 1.0:
        return
    if config.apply_rope_fusion:
        # the fused kernel drops the factor for packed sequences without a word
        raise UserError(
            f"apply_rope_fusion=True cannot scale by the attention factor {factor:.4g} of rope_parameters: "
            "set model.apply_rope_fusion=False"
        )
    for module in model.modules():
        if hasattr(module, "_yarn_concentration_factor"):
            module._yarn_concentration_factor = factor


def _reference_config(config: Any) -> SimpleNamespace:
    """What transformers' functions read from a Hugging Face config."""
    return SimpleNamespace(
        rope_parameters={**config.rope_parameters, "rope_theta": config.rotary_base},
        head_dim=config.kv_channels,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings or config.seq_length,
        standardize_rope_params=lambda: None,
    )
