# SPDX-License-Identifier: Apache-2.0
"""Divide attention masks into tiles, so that no mask of the full sequence is needed.

A token has a segment (one sequence of a packed row) and a position in it. A `QuerySpan` is a range of queries with
consecutive positions: packing makes one for each segment, context parallelism two. `tiles` divides a span into blocks
of queries, each with only the keys that it can see, so a sliding window costs its width instead of the sequence
length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.utils.errors import UserError

CPU_SCORES = 2**24  # elements of the score matrix of a tile without a fused kernel: 64 MB
CUDA_SCORES = 2**26  # 256 MB; with 16 heads and 8,192 tokens, a quarter of the launches
MASKED_ROWS = 512  # queries in a masked tile: 0.5 MB of mask per 1,000 keys

QKV = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


@dataclass(frozen=True)
class AttentionWindow:
    """The number of earlier (``left``) and later (``right``) positions that a query sees; None means no limit."""

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True)
class QuerySpan:
    """Queries ``row .. row + rows`` at positions ``position ..``, and the keys of their segment.

    The keys are rows ``key_row .. key_row + keys`` of the key tensor, at positions 0 and up. Query rows in no span
    are padding and attend to nothing.
    """

    row: int
    rows: int
    position: int
    key_row: int
    keys: int


@dataclass(frozen=True)
class Tile:
    """A block of queries, the keys that at least one of them sees, and the mask between the two."""

    rows: slice
    keys: slice
    causal: bool = False  # query i of a square tile sees the keys up to i
    positions: tuple[int, int] | None = (
        None  # positions of first query and key, if the mask differs
    )


def tiles(span: QuerySpan, window: AttentionWindow, limit: int | None = None) -> Iterator[Tile]:
    """Return tiles with each query of a span in exactly one tile; queries that see no key are left out.

    ``limit`` bounds the queries of a tile; without it, only tiles that need a mask are bounded.
    """
    full_tile = _make_tile(span, window, 0, span.rows)
    if full_tile is not None and full_tile.positions is None and span.rows <= (limit or span.rows):
        yield full_tile
        return
    height = min(_tile_height(window), limit or MASKED_ROWS)
    for first in range(0, span.rows, height):
        tile = _make_tile(span, window, first, min(first + height, span.rows))
        if tile is not None:
            yield tile


def _tile_height(window: AttentionWindow) -> int:
    """Return the width of the window: then half of each tile is visible, and there are few tiles."""
    if window.left is None or window.right is None:
        return MASKED_ROWS
    return max(128, min(MASKED_ROWS, window.left + window.right + 1))


def _make_tile(span: QuerySpan, window: AttentionWindow, first: int, stop: int) -> Tile | None:
    top = span.position + first
    bottom = span.position + stop - 1
    low = 0 if window.left is None else max(0, top - window.left)
    high = span.keys if window.right is None else min(span.keys, bottom + window.right + 1)
    if low >= high:
        return None
    rows = slice(span.row + first, span.row + stop)
    keys = slice(span.key_row + low, span.key_row + high)
    all_back = window.left is None or bottom - window.left <= low
    all_ahead = window.right is None or top + window.right + 1 >= high
    if all_back and all_ahead:
        return Tile(rows, keys)
    if all_back and window.right == 0 and top == low and high - low == stop - first:
        return Tile(rows, keys, causal=True)
    return Tile(rows, keys, positions=(top, low))


def visibility_mask(tile: Tile, window: AttentionWindow, device: torch.device) -> Tensor | None:
    """Return a boolean [queries, keys], true if a query sees a key; None if every query sees every key."""
    height = tile.rows.stop - tile.rows.start
    width = tile.keys.stop - tile.keys.start
    top, low = (0, 0) if tile.positions is None else tile.positions
    if tile.causal:
        window = AttentionWindow(None, 0)
    elif tile.positions is None:
        return None
    visible = torch.ones(height, width, dtype=torch.bool, device=device)
    if window.right is not None:  # key low + j <= query top + i + right
        visible = visible.tril_(top - low + window.right)
    if window.left is not None:
        visible = visible.triu_(top - low - window.left)
    return visible


def tile_biases(plan: list[Tile], window: AttentionWindow, like: Tensor) -> list[Tensor | None]:
    """Return a bias for each tile: 0 if a query sees a key, else -inf; None without a mask or for a causal square.

    A mask depends on the offset between the tile's corner and the diagonal. Tiles with the same height and offset
    are the right-hand part of the widest of them and share its memory: attention keeps its masks for the backward
    pass, and one mask per tile would add up to a mask of the full sequence.
    """

    def kind(tile: Tile, positions: tuple[int, int]) -> tuple[int, int]:
        top, low = positions
        return _slice_length(tile.rows), _slice_length(tile.keys) - (top - low)

    widest: dict[tuple[int, int], Tile] = {}
    for tile in plan:
        if tile.positions is not None:
            key = kind(tile, tile.positions)
            if key not in widest or _slice_length(tile.keys) > _slice_length(widest[key].keys):
                widest[key] = tile
    shared = {}
    for key, tile in widest.items():
        visible = visibility_mask(tile, window, like.device)
        assert visible is not None
        shared[key] = like.new_zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    return [
        None
        if tile.positions is None
        else shared[kind(tile, tile.positions)][:, -_slice_length(tile.keys) :]
        for tile in plan
    ]


def is_mask_of_valid_tokens(mask: Tensor) -> bool:
    """Return whether ``mask`` is boolean [b, s], true for tokens that are no padding.

    Masks of Megatron-Core have four dimensions and are true where a key is hidden.
    """
    return mask.dtype == torch.bool and mask.dim() == 2


def looking_ahead(
    mask: Tensor | None, window: AttentionWindow
) -> tuple[Tensor | None, AttentionWindow]:
    """Return no mask if no query sees later keys, else a window that includes the farthest later key."""
    if mask is None or mask.dtype == torch.bool:
        return mask, window
    reach = max(host_values(mask))
    if window.left is not None and reach > window.left:  # the last token would see all of them
        raise UserError(
            f"{reach + 1} tokens see each other both ways, more than the attention window of {window.left + 1}: "
            "use smaller images or shorter prompts"
        )
    return (
        (mask, AttentionWindow(window.left, reach))
        if reach
        else (None, AttentionWindow(window.left, 0))
    )


def hidden_ahead(ahead: Tensor, span: QuerySpan, tile: Tile) -> Tensor:
    """Return a tile's boolean [b, 1, queries, keys], true after the last key that a query sees by ``ahead`` [b, s]."""
    queries = (
        torch.arange(tile.rows.start, tile.rows.stop, device=ahead.device)
        - span.row
        + span.position
    )
    keys = torch.arange(tile.keys.start, tile.keys.stop, device=ahead.device) - span.key_row
    return (keys > (queries + ahead[:, tile.rows])[..., None])[:, None]


def _slice_length(part: slice) -> int:
    return part.stop - part.start


def slice_sequence(tensor: Tensor, parts: list[slice]) -> list[Tensor]:
    """Split [b, h, s, d] along s. The gradients of the parts are added into one tensor in a single pass."""
    total = tensor.size(2)
    if parts == [slice(0, total)]:
        return [tensor]
    if (
        sum(_slice_length(part) for part in parts) > 4 * total
    ):  # all their gradients at once would take too much memory
        return [tensor[:, :, part] for part in parts]
    return list(_SliceSequence.apply(tensor, parts))  # type: ignore[arg-type]


class _SliceSequence(torch.autograd.Function):
    """Slice along dimension 2, without PyTorch's full-size zero tensor for the gradient of each slice."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, parts: list[slice]) -> tuple[Tensor, ...]:
        ctx.shape = tensor.shape
        ctx.parts = parts
        ctx.set_materialize_grads(False)
        return tuple(tensor[:, :, part] for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        given = [
            (part, grad) for part, grad in zip(ctx.parts, grads, strict=True) if grad is not None
        ]
        total = given[0][1].new_zeros(ctx.shape)
        for part, grad in given:
            total[:, :, part] += grad
        return total, None


def whole_sequence(queries: int, keys: int) -> list[QuerySpan]:
    """Return the span of one segment. With fewer queries than keys (decoding), the queries are its last tokens."""
    return [QuerySpan(row=0, rows=queries, position=keys - queries, key_row=0, keys=keys)]


def chunk_spans(spans: list[QuerySpan], size: int) -> list[QuerySpan]:
    """Split spans at multiples of ``size``; each part has only the keys of its own chunk."""
    cut = []
    for span in spans:
        for first in range(span.position - span.position % size, span.position + span.rows, size):
            start = max(first, span.position)
            stop = min(first + size, span.position + span.rows)
            row = span.row + start - span.position
            keys = min(size, span.keys - first)
            cut.append(QuerySpan(row, stop - start, start - first, span.key_row + first, keys))
    return cut


@dataclass(frozen=True)
class PackedSegment:
    start: int
    length: int
    padded: int  # length with padding


def segments(cu_seqlens: list[int], cu_seqlens_padded: list[int] | None) -> list[PackedSegment]:
    """Return the segments of a packed row from Megatron's cumulative lengths."""
    padded = cu_seqlens_padded or cu_seqlens
    return [
        PackedSegment(start, real_stop - real_start, stop - start)
        for start, stop, real_start, real_stop in zip(
            padded[:-1], padded[1:], cu_seqlens[:-1], cu_seqlens[1:], strict=True
        )
        if stop > start
    ]


def packed_segments(packed: Any) -> tuple[list[PackedSegment], list[PackedSegment]]:
    """Return the segments of queries and of keys from Megatron-Core's ``PackedSeqParams``."""

    def of(real: Tensor, padded: Tensor | None) -> list[PackedSegment]:
        return segments(host_values(real), None if padded is None else host_values(padded))

    return of(packed.cu_seqlens_q, packed.cu_seqlens_q_padded), of(
        packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded
    )


def packed_spans(queries: list[PackedSegment], keys: list[PackedSegment]) -> list[QuerySpan]:
    """Return one span for each segment, without its padding."""
    return [
        QuerySpan(
            row=q.start, rows=q.length, position=k.length - q.length, key_row=k.start, keys=k.length
        )
        for q, k in zip(queries, keys, strict=True)
    ]


def zigzag_spans(parts: list[PackedSegment], rank: int, size: int) -> list[QuerySpan]:
    """Return the spans of one context-parallel rank, which has chunks ``rank`` and ``2 * size - 1 - rank``.

    Megatron divides each segment into ``2 * size`` chunks and assigns a rank one from the front and its mirror image
    from the back, which balances causal work. Keys must be gathered and in natural order.
    """
    spans = []
    row = 0
    for part in parts:
        chunk = part.padded // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            real = max(0, min(chunk, part.length - index * chunk))
            if real:
                spans.append(QuerySpan(row, real, index * chunk, part.start, part.length))
            row += chunk
    return spans


_ON_HOST = "values_on_host"  # attribute of a tensor


def remember_on_host(tensor: Tensor, values: list[int]) -> Tensor:
    """Attach the known ``values`` to the tensor: every layer reads them, and each copy from a GPU would synchronize."""
    setattr(tensor, _ON_HOST, values)
    return tensor


def host_values(tensor: Tensor) -> list[int]:
    """Return the flat values of a constant tensor of integers, which is copied from its device at most once."""
    values: list[int] | None = getattr(tensor, _ON_HOST, None)
    if values is None:
        values = tensor.flatten().tolist()
        remember_on_host(tensor, values)
    return list(values)


def padded_cu_seqlens(packed: Any) -> Tensor:
    """Return the start of each sequence of a packed row, padding included."""
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded


def positions_in_sequences(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the position of each token of a packed row in its sequence, [tokens], on ``cu_seqlens``'s device."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
    return index - cu_seqlens[sequence]
