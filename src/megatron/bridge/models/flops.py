# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a training step, counted on the modules that are trained.

A matrix, or a convolution's kernel, costs two operations for each of its numbers and each token; an expert's the
same for the share of tokens that choose it. Between the matrices, for each token and head:

====================  =================================================================================
attention             2 x (head width of keys + of values) x keys seen; of a sequence's L tokens (L + 1) / 2 on
                      average, or as many as a window has
sparse attention      that of attention to at most dsa_indexer_topk keys, and for the indexer, which scores all keys,
                      2 x (head width + 1)
Mamba-2               2 x tokens seen of a chunk x (state size x groups / heads + head width), and for the state
                      4 x head width x state size (see ``backends.ssd``)
Mamba-1               6 x state size for each feature
Kimi delta attention  that of a gated delta net within chunks of 16 tokens, and 2 x 16 x 2K for decays of each pair
gated delta net       6 x K x V for the state of key width K and value width V, and within chunks of 64 tokens
                      64 x (3K + 2V): scores, outputs and a triangular system (see ``gated_delta_net``)
====================  =================================================================================

The backward pass costs twice as much, of frozen weights once as much; a teacher has none. What is recomputed to
save memory is not counted, nor are vision towers, norms, activations and the embedding's look-up: this is the work
that a model asks for.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn

from megatron.bridge.models.features.feature import average_keys
from megatron.bridge.models.features.registry import FEATURES, feature_of

_BY_THEMSELVES = ("word_embeddings", "position_embeddings", "output_layer")
_TOWER = "vision."  # its work depends on images, not on tokens
_PASSES = 3  # forward, and two for the gradients of inputs and of weights


def flops_per_token(
    chunks: Iterable[nn.Module], length: int, teachers: Iterable[nn.Module] = ()
) -> float:
    """Operations of one step for each token, only forward for ``teachers``; all ranks of a replica call this."""
    here = local_flops_per_token(chunks, length) + local_flops_per_token(
        teachers, length, backward=False
    )
    if not dist.is_initialized():
        return here
    total = torch.tensor(here, dtype=torch.float64)
    total = total.to(torch.cuda.current_device())
    dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return total.item()


def local_flops_per_token(chunks: Iterable[nn.Module], length: int, backward: bool = True) -> float:
    """The part of ``flops_per_token`` that this rank computes; all of it for a full model on one rank."""
    return sum(sum(_chunk_operations(chunk, length, backward)) for chunk in chunks)


def _chunk_operations(chunk: nn.Module, length: int, backward: bool) -> Iterator[float]:
    config: Any = chunk.config
    for name, module in chunk.named_modules():
        for weight in module.parameters(recurse=False):
            if (
                weight.dim() > 1
                and not name.endswith(_BY_THEMSELVES)
                and not name.startswith(_TOWER)
            ):
                yield _of_weight(weight, backward) * _token_share(weight, name, config)
        yield (_PASSES if backward else 1) * operations_between(module, length)
    output: Any = getattr(chunk, "output_layer", None)
    if output is not None and getattr(config, "head", None) != "embedding":
        tied = output.weight is None  # to the embedding's, which only looked up
        weight = chunk.shared_embedding_or_output_weight() if tied else output.weight  # type: ignore[operator]
        if getattr(config, "head", None) is None:
            true = config.vocab_size / config.padded_vocab_size
        else:  # a head for classes, which every tensor-parallel rank holds
            true = 1 / config.tensor_model_parallel_size
        times = 1 + (config.mtp_num_layers or 0)  # again for each further prediction
        yield _of_weight(weight, backward) * true * times


def _of_weight(weight: torch.Tensor, backward: bool) -> float:
    passes = _PASSES - 1 + weight.requires_grad if backward else 1
    return passes * 2 * weight.numel()


def _token_share(weight: torch.Tensor, name: str, config: Any) -> float:
    """Of the tokens, those that a weight is multiplied with; less where other ranks hold the same weight."""
    ranks = config.tensor_model_parallel_size
    if ".experts." in name:
        experts = config.num_moe_experts // config.expert_model_parallel_size
        # a rank's experts are chosen by the tokens of all ranks that share the experts out
        return config.moe_router_topk / experts * config.expert_tensor_ranks / ranks
    return 1.0 if getattr(weight, "tensor_model_parallel", False) else 1.0 / ranks


def operations_between(module: nn.Module, length: int) -> float:
    """Forward operations of one token between the matrices of a layer, on this rank's heads."""
    if isinstance(module, Attention):
        return _of_attention(module, length)
    feature = feature_of(type(module))
    return 0.0 if feature is None else feature.operations(module, length)


def _of_attention(module: Any, length: int) -> float:
    keys, values = head_widths(module.config)
    return (
        2 * (keys + values) * module.num_attention_heads_per_partition * keys_seen(module, length)
    )


def head_widths(config: Any) -> tuple[int, int]:
    """Return the width of a head's keys, and of its values."""
    if config.multi_latent_attention:
        return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    return config.kv_channels, config.kv_channels


def keys_seen(module: Any, length: int) -> float:
    """Return the keys that a token attends to, its own included, on average over a sequence."""
    config = module.config
    for feature in FEATURES:
        if (most := feature.keys_seen(config, length)) is not None:
            return average_keys(most, length)
    return _keys_in_window(config, module.layer_number, length)


def _keys_in_window(config: Any, layer: int, length: int) -> float:
    visible_keys = length
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer):
        visible_keys = min(length, config.window_size[0] + 1)
        if getattr(config, "chunked_attention", False):
            return (visible_keys + 1) / 2
    return average_keys(visible_keys, length)
