# SPDX-License-Identifier: Apache-2.0
"""Scale and normalize embeddings; scale and soft-cap logits; scale queries.

What concerns embeddings and logits applies to the outputs of the embedding and the output layer, so all callers see it
exactly once: losses, multi-token prediction, tied weights, and callers that ask for logits.

Queries grow with their position, so that attention stays sharp over contexts longer than in training: a query at
position p is multiplied by ``1 + beta * log(1 + floor(p / length))``, by 1 within the original training length, and by
more in each further one (Ministral 3). Llama 4 counts positions from 1, and scales only in layers without a rotary
embedding.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from megatron.bridge.backends.attention import context_parallel
from megatron.bridge.backends.attention.block_mask import PackedSegment, packed_segments
from megatron.bridge.backends.attention.shared_sequences import group_of_row
from megatron.bridge.models.features.feature import LayerFeature
from megatron.bridge.utils.config.ranges import ABOVE_ZERO, BELOW_ONE
from megatron.bridge.utils.errors import UserError

SQRT_HIDDEN_SIZE = "sqrt_hidden_size"


@dataclass
class MultiplierFields:
    embedding_dropout: Annotated[float | None, BELOW_ONE] = None
    """Dropout of the embeddings; None is ``hidden_dropout``."""
    embedding_norm: bool = False
    """Embeddings pass an RMSNorm without a gain before the first layer."""
    embedding_multiplier: Annotated[float | Literal["sqrt_hidden_size"], ABOVE_ZERO] = 1.0
    """Multiplies the embeddings; ``sqrt_hidden_size`` is rounded to their precision, as Gemma was trained."""
    residual_multiplier: Annotated[float, ABOVE_ZERO] = 1.0
    """Multiplies what attention and MLP add to the residual stream."""
    logits_scaling: Annotated[float, ABOVE_ZERO] = 1.0
    """Divides the logits."""
    attn_logit_softcapping: Annotated[float | None, ABOVE_ZERO] = None
    """Soft cap on attention scores: ``cap * tanh(score / cap)``."""
    final_logit_softcapping: Annotated[float | None, ABOVE_ZERO] = None
    """Soft cap on the scaled logits: ``cap * tanh(logits / cap)``."""


class MultiplierFeature(LayerFeature):
    """Multipliers and caps; those of residuals and scores are part of the layer spec (``specs.layer_features``)."""

    pricing = {
        "embedding_dropout": "numbers",
        "embedding_norm": "modules",
        "embedding_multiplier": "numbers",
        "residual_multiplier": "numbers",
        "logits_scaling": "numbers",
        "attn_logit_softcapping": "counted",
        "final_logit_softcapping": "numbers",
    }

    def change_model(self, model: nn.Module, config: Any) -> None:
        apply_multipliers(model, config)


class QueryScalingFeature(LayerFeature):
    switches = {"query_scaling_beta": None}
    needs = {"query_scaling_length": "query_scaling_beta"}
    pricing = {"query_scaling_beta": "numbers", "query_scaling_length": "numbers"}

    def change_model(self, model: nn.Module, config: Any) -> None:
        apply_query_scaling(model, config)


def apply_multipliers(model: nn.Module, config: Any) -> None:
    """Scale embeddings and logits of ``model`` (a ``GPTModel``), and drop embeddings, as ``config`` says."""
    if config.embedding_dropout is not None and hasattr(model, "embedding"):
        model.get_submodule("embedding").embedding_dropout = nn.Dropout(config.embedding_dropout)
    if config.embedding_multiplier != 1.0 and hasattr(model, "embedding"):
        model.get_submodule("embedding.word_embeddings").register_forward_hook(
            partial(_scale_embeddings, config)
        )
    if config.embedding_norm and hasattr(model, "embedding"):
        model.get_submodule("embedding.word_embeddings").register_forward_hook(
            partial(_norm_embeddings, config)
        )
    changes = (config.logits_scaling, config.final_logit_softcapping) != (1.0, None)
    if changes and hasattr(model, "output_layer"):
        model.get_submodule("output_layer").register_forward_hook(partial(_change_logits, config))


def _scale_embeddings(config: Any, _module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
    if config.embedding_multiplier != SQRT_HIDDEN_SIZE:
        return embeddings * config.embedding_multiplier
    # Gemma was trained with the factor in the precision of its embeddings: 55.5 in bf16, not 55.4256
    return embeddings * torch.tensor(math.sqrt(config.hidden_size), dtype=embeddings.dtype)


def _norm_embeddings(config: Any, _module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
    return nn.functional.rms_norm(embeddings, embeddings.shape[-1:], eps=config.layernorm_epsilon)


def _change_logits(
    config: Any, _module: nn.Module, _inputs: Any, outputs: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    (logits, bias), divisor, cap = outputs, config.logits_scaling, config.final_logit_softcapping
    logits = logits if divisor == 1.0 else logits / divisor
    return (logits if cap is None else torch.tanh(logits / cap) * cap), bias


def apply_query_scaling(model: nn.Module, config: Any) -> None:
    """Scale the rotated queries of ``model`` (a ``GPTModel``) if ``config.query_scaling_beta`` is not None."""
    if config.query_scaling_beta is None:
        return
    given_length = config.query_scaling_length
    length = given_length or (config.rope_parameters or {}).get("original_max_position_embeddings")
    if not length:
        raise UserError(
            f"query_scaling_beta={config.query_scaling_beta} has no length from which to scale queries: set "
            "rope_parameters.original_max_position_embeddings, or model.query_scaling_length"
        )
    for module in model.modules():
        if isinstance(module, SelfAttention) and (given_length is None or _is_unrotated(module)):
            scale = _scale_queries(
                module, config.query_scaling_beta, length, first=0 if given_length is None else 1
            )
            module.get_submodule("core_attention").register_forward_pre_hook(
                scale, with_kwargs=True
            )


def _is_unrotated(attention: Any) -> bool:
    layers = attention.config.no_rope_freq
    return bool(layers and layers[attention.layer_number - 1])


def _scale_queries(attention: SelfAttention, beta: float, length: int, first: int) -> Any:
    group = attention.pg_collection.cp

    def scale(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        query, key, *other_args = args
        if getattr(module, "cache", None) is not None:  # new tokens of several texts
            positions = module.cache.step.positions
        else:
            positions = _query_positions(query, key, kwargs.get("packed_seq_params"), group)
        factors = 1 + beta * torch.log1p(((positions + first) / length).floor())
        return (
            query * factors.view(-1, *[1] * (query.ndim - 1)).to(query.dtype),
            key,
            *other_args,
        ), kwargs

    return scale


def key_positions(core: Any, key: Tensor, packed: Any, group: Any) -> Tensor:
    """Return the position of each new key in its text, [s] or [t].

    Args:
        core: The core attention, which has a cache while the model decodes.
        key: This rank's keys [s, b, g, d], or packed [t, g, d].
        packed: The bounds of the sequences of a packed row, or None.
        group: The context-parallel ranks.
    """
    if getattr(core, "cache", None) is not None:
        return core.cache.step.positions
    return _query_positions(key, key, packed, group)


def _query_positions(query: Tensor, key: Tensor, packed: Any, group: Any) -> Tensor:
    """Positions of this rank's queries [s, b, h, d], or packed [t, h, d], from the start of each sequence."""
    if packed is not None and packed.qkv_format == "thd":
        parts = packed_segments(packed)[0]
        group = group_of_row(packed, group)
        first = 0
    else:
        total = query.size(0) * _group_size(group)
        # with cached keys, the queries are the last positions
        parts = [PackedSegment(0, total, total)]
        first = key.size(0) - query.size(0)
    positions = first + torch.cat(
        [torch.arange(part.padded, device=query.device) for part in parts]
    )
    if _group_size(group) > 1:
        by_rank = context_parallel.to_rank_order(positions, parts, group.size())
        positions = by_rank.chunk(group.size())[group.rank()]
    return torch.nn.functional.pad(positions, (0, query.size(0) - len(positions)))


def _group_size(group: Any) -> int:
    return 1 if group is None else group.size()
