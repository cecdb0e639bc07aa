# SPDX-License-Identifier: Apache-2.0
"""QK clipping: after an update, query and key weights of heads with large attention scores are scaled down."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor


@torch.no_grad()
def clip_attention_scores(chunks: Sequence[MegatronModule], is_updated: bool) -> None:
    """Bound scores by ``qk_clip_threshold``, with the largest scores since the last call on all ranks.

    A head whose largest score is above the threshold gets weights that give the threshold. A collective.

    Args:
        chunks: The chunks of this rank.
        is_updated: Whether the weights were updated; otherwise the scores are only forgotten.
    """
    group = cast(Any, parallel_state.get_data_parallel_group(with_context_parallel=True))
    for layer in clipped_attentions(chunks):
        core: Any = layer.core_attention
        largest = core.current_max_attn_logits
        if largest is None:
            continue
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        if is_updated:
            clip(layer)
        core.current_max_attn_logits = None


def clipped_attentions(chunks: Sequence[MegatronModule]) -> list[Any]:
    """Return the attention layers of ``chunks``."""
    return [
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Attention)
        and hasattr(module.core_attention, "current_max_attn_logits")
    ]


def clip(layer: Any) -> None:
    """Scale the query and key weights of heads whose largest score is above the threshold."""
    threshold = layer.config.qk_clip_threshold
    largest: Tensor = layer.core_attention.current_max_attn_logits
    # Megatron-Core divides by it, and would get a negative factor
    largest.clamp_(min=1e-6 * threshold)
    if isinstance(layer, MultiLatentAttention):
        layer.clip_qk()
    else:
        _clip_fused_weight(layer, largest)


def _clip_fused_weight(layer: Any, largest: Tensor) -> None:
    """Scale queries and keys in the fused weight and bias.

    ``clip_qk`` of Megatron-Core 0.19.2 divides the rows of all tensor-parallel ranks by the groups of one, which fails
    with tensor parallelism, and leaves biases out.
    """
    config = layer.config
    groups = layer.num_query_groups_per_partition
    width = layer.hidden_size_per_attention_head
    factor = (config.qk_clip_threshold / largest.view(groups, -1).amax(1)).clamp(max=1)
    factor = factor.view(groups, 1, 1)
    for tensor in _weights_and_masters(layer.linear_qkv):
        by_group = tensor.view(groups, tensor.shape[0] // groups, -1)
        by_group[:, : -2 * width].mul_(factor**config.qk_clip_alpha)
        by_group[:, -2 * width : -width].mul_(factor ** (1 - config.qk_clip_alpha))


def _weights_and_masters(linear: Any) -> Iterator[Tensor]:
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            yield parameter.data
            if (master := getattr(parameter, "main_param", None)) is not None:
                yield master.data
