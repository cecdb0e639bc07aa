# SPDX-License-Identifier: Apache-2.0
"""Fields of Falcon's configuration, whose two architectures share one config class."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.bridge.models.conversion.declare.decoder_fields import ACTIVATION, DENSE
from megatron.bridge.models.conversion.declare.fields import (
    Field,
    override,
    read_by_others,
)
from megatron.bridge.utils.errors import UserError


def _ffn_width(width: int | None, config: Mapping[str, Any]) -> int:
    return 4 * config["hidden_size"] if width is None else width


def _key_heads(count: int | None, config: Mapping[str, Any]) -> int:
    """Return the number of key-value heads; ``multi_query`` decides without ``new_decoder_architecture``."""
    if not config.get("new_decoder_architecture") and config.get("multi_query", True):
        return 1
    return count or config["num_attention_heads"]


def _groups_back(groups: int, provider: Any) -> int:
    return groups if _is_new(provider) else provider.num_attention_heads


def _norm_placement(parallel: bool, config: Mapping[str, Any]) -> str | None:
    """Return the placement: two parallel norms, one norm for both parts of a layer, or one before each part."""
    if not config.get("new_decoder_architecture"):
        return "shared_norm" if parallel else None
    count = config.get("num_ln_in_parallel_attn")
    if not parallel or count not in (None, 1, 2):
        raise UserError(
            f"parallel_attn={parallel} and num_ln_in_parallel_attn={count} with new_decoder_architecture=True: "
            "parallel_attn must be true, and the number 1 or 2"
        )
    return "shared_norm" if count == 1 else "own_norms"


def _is_new(provider: Any) -> bool:
    """Return ``new_decoder_architecture``: False if the older architecture computes the same."""
    several = 1 < provider.num_query_groups < provider.num_attention_heads
    return provider.parallel_residual == "own_norms" or (
        provider.parallel_residual == "shared_norm" and several
    )


def _norm_count(provider: Any) -> int | None:
    return (
        {"own_norms": 2, "shared_norm": 1}[provider.parallel_residual]
        if _is_new(provider)
        else None
    )


_OWN = (
    replace(ACTIVATION, hf="activation", default="gelu"),
    Field("ffn_hidden_size", "ffn_hidden_size", default=None, to=_ffn_width),
    Field("layer_norm_epsilon", "layernorm_epsilon", default=1e-5),
    Field("max_position_embeddings", ("max_position_embeddings", "seq_length"), default=2048),
    Field("num_kv_heads", "num_query_groups", default=None, to=_key_heads, back=_groups_back),
    Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=True),
)

FALCON = (
    *(field for field in override(DENSE, *_OWN) if field.hf != "head_dim"),
    Field("bias", "add_bias_linear", default=False),
    Field(
        "parallel_attn",
        "parallel_residual",
        default=True,
        to=_norm_placement,
        back=lambda kind, _: kind is not None,
    ),
    read_by_others("new_decoder_architecture", False, _is_new),
    read_by_others("num_ln_in_parallel_attn", None, _norm_count),
    read_by_others(
        "multi_query",
        True,
        lambda provider: provider.num_query_groups < provider.num_attention_heads,
    ),
    Field(
        "alibi",
        ("alibi", "position_embedding_type"),
        default=False,
        to=lambda alibi, _: (alibi, "none" if alibi else "rope"),
        back=lambda values, _: values[0],
    ),
)
