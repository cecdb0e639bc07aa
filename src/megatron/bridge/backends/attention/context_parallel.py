# SPDX-License-Identifier: Apache-2.0
"""Move sequences between context-parallel ranks, and between Megatron's zigzag order and the natural order.

Tensors are [sequence, batch, heads, size]. Every function here is differentiable.
"""

import math

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region

from megatron.bridge.backends.attention.block_mask import PackedSegment


def gather_sequence(
    local: torch.Tensor, parts: list[PackedSegment], group: dist.ProcessGroup
) -> torch.Tensor:
    """Gather the full sequence in natural order on every rank; the backward pass reduce-scatters gradients."""
    gathered = gather_from_sequence_parallel_region(local.contiguous(), group=group)
    return to_natural_order(gathered, parts, group.size())


def sequence_to_heads(
    local: torch.Tensor, parts: list[PackedSegment], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange a part of the sequence with all heads for the full sequence with ``heads / size`` heads."""
    return to_natural_order(exchange_rows_for_heads(local, group), parts, group.size())


def heads_to_sequence(
    natural: torch.Tensor, parts: list[PackedSegment], group: dist.ProcessGroup
) -> torch.Tensor:
    """The inverse of `sequence_to_heads`."""
    return exchange_heads_for_rows(to_rank_order(natural, parts, group.size()), group)


def exchange_rows_for_heads(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange this rank's rows with all heads for the rows of all ranks, in rank order, with a part of the heads."""
    size = group.size()
    rows, batch, heads, width = local.shape
    by_heads = local.view(rows, batch, size, heads // size, width).permute(2, 0, 1, 3, 4)
    exchanged = all_to_all(group, by_heads.reshape(size * rows, -1))
    return exchanged.view(size * rows, batch, heads // size, width)


def exchange_heads_for_rows(by_rank: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of `exchange_rows_for_heads`."""
    size = group.size()
    total, batch, heads, width = by_rank.shape
    exchanged = all_to_all(group, by_rank.reshape(total, -1))
    by_heads = exchanged.view(size, total // size, batch, heads, width).permute(1, 2, 0, 3, 4)
    return by_heads.reshape(total // size, batch, size * heads, width)


def repeats_for_heads(groups: int, heads: int, size: int) -> int | None:
    """Return how often key and value heads must be repeated so that ``size`` ranks can share them evenly.

    None if no repetition achieves this; then all-to-all attention cannot run.
    """
    repeats = size // math.gcd(groups, size)
    if heads % size or (heads // groups) % repeats:
        return None
    return repeats


def to_natural_order(by_rank: torch.Tensor, parts: list[PackedSegment], size: int) -> torch.Tensor:
    """Reorder rows from rank order (all rows of rank 0, then of rank 1, ...) to sequence order."""
    order = _chunk_order(parts, size)
    lengths = [length for _, length in order]
    # split and cat instead of slices: the gradient of each slice would be a full-size zero tensor
    chunks = by_rank.split(lengths)
    natural: list[torch.Tensor] = [by_rank] * len(order)
    for (position, _), chunk in zip(order, chunks, strict=True):
        natural[position] = chunk
    return torch.cat(natural)


def to_rank_order(natural: torch.Tensor, parts: list[PackedSegment], size: int) -> torch.Tensor:
    """The inverse of `to_natural_order`."""
    order = _chunk_order(parts, size)
    lengths = [0] * len(order)
    for position, length in order:
        lengths[position] = length
    chunks = natural.split(lengths)
    return torch.cat([chunks[position] for position, _ in order])


def _chunk_order(parts: list[PackedSegment], size: int) -> list[tuple[int, int]]:
    """Return the position in natural order and the length of each chunk, in rank order."""
    return [
        (index * 2 * size + chunk, part.padded // (2 * size))
        for rank in range(size)
        for index, part in enumerate(parts)
        for chunk in (rank, 2 * size - 1 - rank)
    ]
