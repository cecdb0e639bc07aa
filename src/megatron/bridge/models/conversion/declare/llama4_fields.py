# SPDX-License-Identifier: Apache-2.0
"""Fields of Llama 4: chunks of attention, queries that grow, experts in listed layers."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.backends.specs.layer_specs import moe_pattern
from megatron.bridge.models.conversion.declare.fields import Field, kind_indices
from megatron.bridge.utils.errors import UserError

_KINDS = ("full_attention", "chunked_attention")
_SCALING = ("query_scaling_beta", "query_scaling_length")


def _chunk_pattern(kinds: list[str], config: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer with chunks."""
    chunked = kind_indices("layer_types", kinds, _KINDS, config)
    if any(chunked) and config.get("attention_chunk_size", 8192) is None:
        raise UserError(f"attention_chunk_size is missing: layer_types has {_KINDS[1]}")
    return chunked


def _chunked_back(layers: Any, provider: Any) -> list[str]:
    return [_KINDS[layer] for layer in layers or [0] * provider.num_layers]


def _read_chunk_size(size: int | None, _: Any) -> tuple[tuple[int, int] | None, bool]:
    if size is not None and size < 1:
        raise UserError(
            f"attention_chunk_size={size} must be at least 1, or null for full sequences"
        )
    return None if size is None else (size - 1, 0), size is not None


def _chunk_back(values: tuple[Any, bool], _: Any) -> int | None:
    return values[0] and values[0][0] + 1


def _query_scaling(_: Any, config: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """Return (beta, length), both None if queries are not scaled."""
    if not config.get("attn_temperature_tuning", True):
        return None, None
    return config.get("attn_scale", 0.1), config.get("floor_scale", 8192)


def _listed_pattern(layers: list[int], config: Mapping[str, Any]) -> int | list[int]:
    count = config["num_hidden_layers"]
    if not layers or not set(layers) <= set(range(count)):
        raise UserError(
            f"moe_layers={layers} must name layers from 0 to {count - 1}, and at least one"
        )
    pattern = [int(layer in layers) for layer in range(count)]
    return pattern if 0 in pattern else 1


def _listed_back(_: Any, provider: Any) -> list[int]:
    return [layer for layer, sparse in enumerate(moe_pattern(provider)) if sparse]


def _single_expert(count: int, _: Any) -> int:
    if count != 1:
        raise UserError(
            f"num_experts_per_tok={count} must be 1: Megatron-Core weights the input of one expert only"
        )
    return count


CHUNKS: tuple[Field, ...] = (
    Field(
        "attention_chunk_size",
        ("window_size", "chunked_attention"),
        default=8192,
        to=_read_chunk_size,
        back=_chunk_back,
    ),
    Field("layer_types", "window_attn_skip_freq", to=_chunk_pattern, back=_chunked_back),
)
"""Layers in which tokens attend only to tokens of their chunk."""

QUERY_GROWTH: tuple[Field, ...] = (
    Field(
        "attn_temperature_tuning",
        _SCALING,
        default=True,
        to=_query_scaling,
        back=lambda it, _: it[0] is not None,
    ),
    Field(
        "attn_scale",
        _SCALING,
        default=0.1,
        to=_query_scaling,
        back=lambda it, _: 0.1 if it[0] is None else it[0],
    ),
    Field(
        "floor_scale", _SCALING, default=8192, to=_query_scaling, back=lambda it, _: it[1] or 8192
    ),
)
"""Scaling of queries with their position, in layers without a rotary embedding."""

LISTED_EXPERTS: tuple[Field, ...] = (
    Field("moe_layers", "moe_layer_freq", to=_listed_pattern, back=_listed_back),
    Field("num_local_experts", "num_moe_experts"),
    Field("num_experts_per_tok", "moe_router_topk", default=1, to=_single_expert),
    Field("intermediate_size", ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")),
    Field("intermediate_size_mlp", "ffn_hidden_size"),
)
"""A shared expert and one routed expert per token in listed layers, wider feed-forward layers elsewhere."""
