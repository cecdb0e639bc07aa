# SPDX-License-Identifier: Apache-2.0
"""Granite 4: Mamba-2 mixers in the place of attention in most layers, with experts or without."""

from collections.abc import Mapping
from math import inf
from typing import Any

from megatron.bridge.models.conversion.declare.blocks import attention, ends
from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.declare.hybrid_blocks import mamba
from megatron.bridge.models.conversion.declare.hybrid_fields import MAMBA_LAYERS, ONE_GROUP, of_experts
from megatron.bridge.models.conversion.declare.moe_blocks import router, shared_experts, stacked_experts
from megatron.bridge.models.conversion.declare.moe_fields import AUX_LOSS, expert_sizes
from megatron.bridge.models.conversion.model_bridge import register_bridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ConcatenatedGatedMLPMapping,
    ReplicatedMapping,
)
from megatron.bridge.models.granite.granitemoe_bridge import GraniteMoeBridge

_COUNT = "num_local_experts"
_EXPERTS = (*expert_sizes(_COUNT, "intermediate_size"), AUX_LOSS)
_KEYS = {field.hf for field in _EXPERTS}
_MLP, _THEIRS = "decoder.layers.*.mlp", "model.layers.*.shared_mlp"


def _shared(width: int, config: Mapping[str, Any]) -> tuple[int, int | None]:
    """Width of the feed-forward layers; beside experts, they are one that all tokens pass."""
    return width, width if config.get(_COUNT) else None


def _positions(kind: str | None, _: Any) -> str:
    return "rope" if kind == "rope" else "none"


def _positions_back(kind: str, _: Any) -> str:
    return "rope" if kind == "rope" else "nope"


@register_bridge("GraniteMoeHybridForCausalLM", model_type="granitemoehybrid")
class GraniteMoeHybridBridge(GraniteMoeBridge):
    """Hugging Face's ``GraniteMoeHybridForCausalLM`` and Megatron's ``GPTModel``."""

    fields = (
        *(field for field in GraniteMoeBridge.fields if field.hf not in _KEYS),
        *of_experts(*_EXPERTS, count=_COUNT),
        Field(
            "shared_intermediate_size",
            ("ffn_hidden_size", "moe_shared_expert_intermediate_size"),
            to=_shared,
        ),
        Field("position_embedding_type", "position_embedding_type", default=None, to=_positions, back=_positions_back),
        *MAMBA_LAYERS,
    )
    fixed = {**GraniteMoeBridge.fixed, **ONE_GROUP}
    irrelevant = {
        **GraniteMoeBridge.irrelevant,
        **dict.fromkeys(("mamba_chunk_size", "init_method")),
        "normalization_function": ("rmsnorm",),
        "time_step_limit": ([0.0, inf], (0.0, inf)),
    }
    weights = (
        *GraniteMoeBridge.weights,
        mamba("model.layers.*", "mamba", "input_layernorm", replaces_attention=True),
        (
            ReplicatedMapping(
                f"{_MLP}.linear_fc1.layer_norm_weight", "model.layers.*.post_attention_layernorm.weight"
            ),
            ConcatenatedGatedMLPMapping(f"{_MLP}.linear_fc1.weight", f"{_THEIRS}.input_linear.weight"),
            AutoMapping(f"{_MLP}.linear_fc2.weight", f"{_THEIRS}.output_linear.weight"),
        ),
    )
