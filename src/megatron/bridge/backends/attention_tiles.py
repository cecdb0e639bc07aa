# SPDX-License-Identifier: Apache-2.0
"""Which queries see which keys, cut into tiles that need no mask of the whole sequence.

A token is known by its segment (one sequence of a packed row) and its position there. A `Run` is a stretch of
queries with consecutive positions: packing makes one for each segment, context parallelism two. `tiles` cuts a run
into blocks of queries, each with only the keys that it can see, so that a sliding window costs its width and not
the sequence's length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

MASKED_ROWS = 512  # queries of a masked tile: 0.5 MB of mask per 1,000 keys


@dataclass(frozen=True)
class Sight:
    """How far a query sees back (``left``) and ahead (``right``) in positions; None is without limit."""

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True)
class Run:
    """Queries ``row .. row + rows`` at positions ``position ..``, and the keys of their segment.

    The keys are rows ``key_row .. key_row + keys`` of the key tensor, at positions 0 and up. Rows of queries that
    no run covers are padding and attend to nothing.
    """

    row: int
    rows: int
    position: int
    key_row: int
    keys: int


@dataclass(frozen=True)
class Tile:
    """A block of queries, the keys that at least one of them sees, and what is hidden between the two.

    ``causal`` says that query i sees the keys up to i (a square); ``positions``, if not None, holds the positions
    of the first query and of the first key, from which `visible` tells who sees whom. With neither, all is seen.
    """

    rows: slice
    keys: slice
    causal: bool = False
    positions: tuple[int, int] | None = None


def tiles(run: Run, sight: Sight, limit: int | None = None) -> Iterator[Tile]:
    """Tiles that cover the run's queries, each query in exactly one; queries that see no key are left out.

    ``limit`` bounds the queries of a tile; without it only tiles that need a mask are bounded.
    """
    whole = _tile(run, sight, 0, run.rows)
    if whole is not None and whole.positions is None and run.rows <= (limit or run.rows):
        yield whole
        return
    height = min(_height(sight), limit or MASKED_ROWS)
    for first in range(0, run.rows, height):
        tile = _tile(run, sight, first, min(first + height, run.rows))
        if tile is not None:
            yield tile


def _height(sight: Sight) -> int:
    """As high as the window is wide: then half of a tile is seen, and the tiles stay few."""
    if sight.left is None or sight.right is None:
        return MASKED_ROWS
    return max(128, min(MASKED_ROWS, sight.left + sight.right + 1))


def _tile(run: Run, sight: Sight, first: int, stop: int) -> Tile | None:
    top, bottom = run.position + first, run.position + stop - 1
    low = 0 if sight.left is None else max(0, top - sight.left)
    high = run.keys if sight.right is None else min(run.keys, bottom + sight.right + 1)
    if low >= high:
        return None
    rows = slice(run.row + first, run.row + stop)
    keys = slice(run.key_row + low, run.key_row + high)
    all_back = sight.left is None or bottom - sight.left <= low
    all_ahead = sight.right is None or top + sight.right + 1 >= high
    if all_back and all_ahead:
        return Tile(rows, keys)
    if all_back and sight.right == 0 and top == low and high - low == stop - first:
        return Tile(rows, keys, causal=True)
    return Tile(rows, keys, positions=(top, low))


def visible(tile: Tile, sight: Sight, device: torch.device) -> torch.Tensor | None:
    """Boolean [queries, keys], true where a query of the tile sees a key; None if all do."""
    height, width = tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start
    top, low = (0, 0) if tile.positions is None else tile.positions
    if tile.causal:
        sight = Sight(None, 0)
    elif tile.positions is None:
        return None
    seen = torch.ones(height, width, dtype=torch.bool, device=device)
    if sight.right is not None:  # key low + j <= query top + i + right
        seen = seen.tril_(top - low + sight.right)
    if sight.left is not None:
        seen = seen.triu_(top - low - sight.left)
    return seen


def tile_biases(plan: list[Tile], sight: Sight, like: torch.Tensor) -> list[torch.Tensor | None]:
    """For each tile, 0 where a query sees a key and -inf elsewhere; None if all is seen, or a causal square.

    What a tile hides depends on how its corner lies to the diagonal. Tiles of one height whose last query sees as
    far as each other's are right-hand parts of the widest of them, and share its memory: attention keeps its masks
    for the backward pass, and a mask per tile would add up to one of the whole sequence.
    """

    def kind(tile: Tile, positions: tuple[int, int]) -> tuple[int, int]:
        top, low = positions
        return _length(tile.rows), _length(tile.keys) - (top - low)

    widest: dict[tuple[int, int], Tile] = {}
    for tile in plan:
        if tile.positions is not None:
            key = kind(tile, tile.positions)
            if key not in widest or _length(tile.keys) > _length(widest[key].keys):
                widest[key] = tile
    shared = {}
    for key, tile in widest.items():
        seen = visible(tile, sight, like.device)
        assert seen is not None
        shared[key] = like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    return [
        None if tile.positions is None else shared[kind(tile, tile.positions)][:, -_length(tile.keys) :]
        for tile in plan
    ]


def _length(part: slice) -> int:
    return part.stop - part.start


def take(tensor: torch.Tensor, parts: list[slice]) -> list[torch.Tensor]:
    """Parts of [b, h, s, d] along s, with a gradient that is put together in one pass."""
    total = tensor.size(2)
    if parts == [slice(0, total)]:
        return [tensor]
    if sum(_length(part) for part in parts) > 4 * total:  # their gradients, all at once, would be too much
        return [tensor[:, :, part] for part in parts]
    return list(_Take.apply(tensor, parts))  # type: ignore[arg-type]


class _Take(torch.autograd.Function):
    """Slices along dimension 2. PyTorch's own make a zero tensor of full size for the gradient of each."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, parts: list[slice]) -> tuple[torch.Tensor, ...]:
        ctx.shape, ctx.parts = tensor.shape, parts
        ctx.set_materialize_grads(False)
        return tuple(tensor[:, :, part] for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        given = [(part, grad) for part, grad in zip(ctx.parts, grads, strict=True) if grad is not None]
        total = given[0][1].new_zeros(ctx.shape)
        for part, grad in given:
            total[:, :, part] += grad
        return total, None


# --------------------------------------------------------------------------------------------------- layouts


def whole_sequence(queries: int, keys: int) -> list[Run]:
    """One segment; with fewer queries than keys (decoding), the queries are its last tokens."""
    return [Run(row=0, rows=queries, position=keys - queries, key_row=0, keys=keys)]


@dataclass(frozen=True)
class Segment:
    """A packed sequence: where its rows start, how many are real, and how many there are with its padding."""

    start: int
    length: int
    padded: int


def segments(cu_seqlens: list[int], cu_seqlens_padded: list[int] | None) -> list[Segment]:
    """The segments of a packed row from Megatron's cumulative lengths."""
    padded = cu_seqlens_padded or cu_seqlens
    return [
        Segment(start, real_stop - real_start, stop - start)
        for start, stop, real_start, real_stop in zip(
            padded[:-1], padded[1:], cu_seqlens[:-1], cu_seqlens[1:], strict=True
        )
        if stop > start
    ]


def packed_segments(packed: Any) -> tuple[list[Segment], list[Segment]]:
    """The segments of queries and of keys, from Megatron-Core's ``PackedSeqParams``."""

    def of(real: torch.Tensor, padded: torch.Tensor | None) -> list[Segment]:
        return segments(real.tolist(), None if padded is None else padded.tolist())

    return of(packed.cu_seqlens_q, packed.cu_seqlens_q_padded), of(
        packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded
    )


def packed_runs(queries: list[Segment], keys: list[Segment]) -> list[Run]:
    """One run for each segment; its padding is left out."""
    return [
        Run(row=q.start, rows=q.length, position=k.length - q.length, key_row=k.start, keys=k.length)
        for q, k in zip(queries, keys, strict=True)
    ]


def zigzag_runs(parts: list[Segment], rank: int, size: int) -> list[Run]:
    """The runs of one context parallel rank, whose rows hold chunks ``rank`` and ``2 * size - 1 - rank``.

    Megatron cuts each segment into ``2 * size`` chunks and gives a rank one from the front and its mirror image
    from the back, which balances causal work. The keys are taken as gathered and in natural order.
    """
    runs = []
    row = 0
    for part in parts:
        chunk = part.padded // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            real = max(0, min(chunk, part.length - index * chunk))
            if real:
                runs.append(Run(row, real, index * chunk, part.start, part.length))
            row += chunk
    return runs
