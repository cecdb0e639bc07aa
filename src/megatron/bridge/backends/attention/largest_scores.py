# SPDX-License-Identifier: Apache-2.0
"""The largest attention score of each head, which QK clipping bounds (Kimi Team, "Kimi K2", 2025, arXiv:2507.20534).

Fused kernels do not return it, so the scores are computed once more, tile by tile.
"""

import torch
from torch import Tensor

from megatron.bridge.backends.attention.block_mask import (
    CPU_SCORES,
    CUDA_SCORES,
    AttentionWindow,
    QuerySpan,
    tile_biases,
    tiles,
)


@torch.no_grad()
def largest_scores(
    query: Tensor, key: Tensor, spans: list[QuerySpan], window: AttentionWindow, scale: float
) -> Tensor:
    """Return the largest score of each head, [h], in fp32.

    Args:
        query: [s, b, h, d].
        key: [s, b, g, d], in natural order.
        spans: The queries, and the keys of their sequences.
        window: The keys that a query sees.
        scale: A factor of the scores.
    """
    heads = query.size(2)
    q, k = (tensor.permute(1, 2, 0, 3) for tensor in (query, key))
    k = k.repeat_interleave(heads // k.size(1), dim=1)
    scores_of_tile = CUDA_SCORES if q.is_cuda else CPU_SCORES
    limit = max(16, scores_of_tile // (q.size(0) * heads * k.size(2)))
    plan = [tile for span in spans for tile in tiles(span, window, limit)]
    largest = torch.full((heads,), float("-inf"), device=q.device)
    for tile, bias in zip(plan, tile_biases(plan, window, q), strict=True):
        scores = (q[:, :, tile.rows] @ k[:, :, tile.keys].mT).float() * scale
        if tile.causal:
            hidden = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
            scores.masked_fill_(hidden, float("-inf"))
        if bias is not None:
            scores += bias
        largest = torch.maximum(largest, scores.amax((0, 2, 3)))
    return largest
