# SPDX-License-Identifier: Apache-2.0
"""Attention whose keys and values travel around the context-parallel ranks (``cp_comm_type=p2p``).

A rank computes attention of its queries to one rank's keys at a time, while the keys of the next rank arrive (Liu et
al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889). For scores s_j of a block, a kernel returns
the output of the block and l = log(sum_j exp(s_j)). Two blocks are merged exactly:

    l = log(exp(l_1) + exp(l_2)),    out = exp(l_1 - l) out_1 + exp(l_2 - l) out_2

In the backward pass the probabilities of a block are exp(s_j - l) with the l of all blocks, so each block is
computed by itself. The gradients of keys and values travel with them, and are added in fp32.

A rank has two chunks of each segment, ``rank`` and ``2 * size - 1 - rank``, so causal work is balanced. Blocks that
no query of a rank sees cost nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.bridge.backends.attention import flash_attention
from megatron.bridge.backends.attention.block_mask import (
    CPU_SCORES,
    CUDA_SCORES,
    QKV,
    AttentionWindow,
    PackedSegment,
    QuerySpan,
    Tile,
    tile_biases,
    tiles,
)
from megatron.bridge.backends.attention.sink_attention import CpuFlashKernel, CudaFlashKernel

_KEYS, _GRADIENTS = 0, 1  # tags of the messages that are under way at the same time


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a segment that are together on a rank, without padding."""

    segment: tuple[
        int, int
    ]  # number of the segment, and of the part of it in which tokens see each other
    position: int  # of the first token in its segment
    row: int  # of the first token among the rank's tokens
    tokens: int


def zigzag_chunks(
    parts: list[PackedSegment], ranks: list[int], size: int, visible_chunk: int | None = None
) -> list[Chunk]:
    """Return the chunks that some ranks have; the rows of one rank follow those of the rank before.

    Args:
        parts: The segments.
        ranks: Context-parallel ranks.
        size: The number of context-parallel ranks.
        visible_chunk: With chunked attention, the number of positions that see each other.
    """
    chunks: list[Chunk] = []
    row = 0
    for rank in ranks:
        for segment, part in enumerate(parts):
            length = part.padded // (2 * size)
            for index in (rank, 2 * size - 1 - rank):
                start = index * length
                stop = min(start + length, part.length)
                step = visible_chunk or part.padded
                for first in range(start - start % step, stop, step):
                    begin = max(first, start)
                    tokens = min(first + step, stop) - begin
                    chunk_row = row + begin - start
                    chunks.append(Chunk((segment, first // step), begin, chunk_row, tokens))
                row += length
    return chunks


@dataclass(frozen=True)
class Ring:
    """The ranks that pass keys and values on, and the attention that they compute.

    Attributes:
        group: Each rank sends to the next.
        chunks: The chunks of each rank of the group.
        window: The keys that a query sees.
        scale: A factor of the scores.
        softcap: The bound of the scores, or None.
    """

    group: dist.ProcessGroup
    chunks: list[list[Chunk]]
    window: AttentionWindow
    scale: float
    softcap: float | None

    def attend(self, qkv: QKV, sinks: Tensor | None) -> Tensor:
        """Compute attention [s, b, h, dv] of this rank's [s, b, h, d], [s, b, g, d] and [s, b, g, dv]."""
        out: Any = _RingAttention.apply(*qkv, sinks, self)
        return out

    def forward(self, qkv: QKV) -> tuple[Tensor, Tensor]:
        """Return the fp32 output [s, b, h, dv] and log-sum-exp [b, h, s] over the keys of all ranks.

        Queries without keys, which are padding, have zeros and -inf.
        """
        query, key, value = qkv
        q = query.permute(1, 2, 0, 3)
        joined = q.new_zeros((*query.shape[:-1], value.size(-1)), dtype=_accumulated(q))
        out = joined.permute(1, 2, 0, 3)
        log_sum = q.new_full(q.shape[:-1], float("-inf"), dtype=_accumulated(q))
        for _, keys, values, chunks in self._blocks(key, value):
            for tile, kernel in self._tiles(q, keys, chunks):
                inputs = _tile_of(tile, q, keys, _padded(values, q))
                tile_out, tile_log_sum = kernel.forward(*inputs)
                tile_out = tile_out[..., : values.size(-1)]
                _merge(out[:, :, tile.rows], log_sum[:, :, tile.rows], tile_out, tile_log_sum)
        return joined, log_sum

    def backward(self, grad: Tensor, out: Tensor, log_sum: Tensor, qkv: QKV) -> QKV:
        """Return the gradients of this rank's queries, keys and values, for that of ``out`` [b, h, s, dv]."""
        query, key, value = qkv
        q = query.permute(1, 2, 0, 3)
        grad = _padded(grad, q)
        out = _padded(out, q)
        q_grad = torch.zeros_like(q, dtype=_accumulated(q))
        arriving: Callable[[], Tensor] | None = None
        for step, keys, values, chunks in self._blocks(key, value):
            shapes = (key.shape, value.shape)
            packet = q_grad.new_zeros(key.numel() + value.numel())
            k_grad, v_grad = _unpack(packet, *shapes)
            for tile, kernel in self._tiles(q, keys, chunks):
                inputs = _tile_of(tile, q, keys, _padded(values, q))
                rows = tile.rows
                of_rows = (grad[:, :, rows], out[:, :, rows], log_sum[:, :, rows])
                by_tile = kernel.backward(*of_rows, *inputs)
                q_grad[:, :, tile.rows] += by_tile[0]
                k_grad[:, :, tile.keys] += by_tile[1]
                v_grad[:, :, tile.keys] += by_tile[2][..., : values.size(-1)]
            if arriving is not None:
                packet += arriving()
            last = step == self.group.size() - 1
            arriving = self._pass_on(packet, _GRADIENTS)
            if last:
                k_grad, v_grad = _unpack(arriving(), *shapes)
                grads = (q_grad, k_grad, v_grad)
                dq, dk, dv = (part.permute(2, 0, 1, 3).to(query.dtype) for part in grads)
                return dq, dk, dv
        raise AssertionError("a ring has at least one rank")

    def _blocks(
        self, key: Tensor, value: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor, list[Chunk]]]:
        """Yield the number of the step, keys and values [b, g, s, ...] and chunks of this rank, the one before, ..."""
        size = self.group.size()
        packet = torch.cat((key.reshape(-1), value.reshape(-1)))
        for step in range(size):
            next_packet = self._pass_on(packet, _KEYS) if step < size - 1 else None
            keys, values = _unpack(packet, key.shape, value.shape)
            yield step, keys, values, self.chunks[(self.group.rank() - step) % size]
            if next_packet is not None:
                packet = next_packet()

    def _pass_on(self, packet: Tensor, tag: int) -> Callable[[], Tensor]:
        """Send a flat tensor to the next rank; return a function that waits for that of the rank before."""
        size = self.group.size()
        if size == 1:
            return lambda: packet
        ranks = dist.get_process_group_ranks(self.group)
        rank = self.group.rank()
        received = torch.empty_like(packet)
        messages = [
            dist.P2POp(dist.isend, packet, ranks[(rank + 1) % size], self.group, tag),
            dist.P2POp(dist.irecv, received, ranks[rank - 1], self.group, tag),
        ]
        works = dist.batch_isend_irecv(messages)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def _tiles(
        self, q: Tensor, keys: Tensor, chunks: list[Chunk]
    ) -> Iterator[tuple[Tile, "TileKernel"]]:
        """Yield tiles of this rank's queries and the keys of ``chunks``, with what computes them."""
        queries = self.chunks[self.group.rank()]
        spans = [
            QuerySpan(q.row, q.tokens, q.position - k.position, k.row, k.tokens)
            for q in queries
            for k in chunks
            if q.segment == k.segment
        ]
        seeing = [part for span in spans if (part := _seeing_rows(span, self.window)) is not None]
        fused = self.softcap is None and (q.device.type == "cpu" or flash_attention.is_supported(q))
        scores = CUDA_SCORES if q.is_cuda else CPU_SCORES
        limit = max(16, scores // (q.size(0) * q.size(1) * keys.size(2)))
        plan = [
            tile for span in seeing for tile in tiles(span, self.window, None if fused else limit)
        ]
        for tile, bias in zip(plan, tile_biases(plan, self.window, q), strict=True):
            yield tile, self._kernel(q, tile, bias)

    def _kernel(self, q: Tensor, tile: Tile, bias: Tensor | None) -> "TileKernel":
        if self.softcap is None and q.device.type == "cpu":
            return CpuFlashKernel(bias, tile.causal, self.scale)
        if self.softcap is None and bias is None and flash_attention.is_supported(q):
            return BatchedFlashKernel(tile.causal, self.scale)
        return FormulaKernel(bias, tile.causal, self.scale, self.softcap)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: Ring
    ) -> Tensor:
        out, log_sum = ring.forward((query, key, value))
        if sinks is not None:  # as in `sink_attention`
            with_sinks = torch.logaddexp(log_sum, sinks.to(log_sum).unsqueeze(-1))
            out = out * (log_sum - with_sinks).exp().permute(2, 0, 1).unsqueeze(-1)
            log_sum = with_sinks
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, log_sum)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, log_sum = ctx.saved_tensors
        grad, out = (part.contiguous().permute(1, 2, 0, 3) for part in (grads[0], out))
        sinks_grad = None
        if sinks is not None:
            shares = (sinks.to(log_sum).unsqueeze(-1) - log_sum).exp()
            sinks_grad = -(shares * (grad.to(log_sum) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        ring: Ring = ctx.ring
        return *ring.backward(grad, out, log_sum, (query, key, value)), sinks_grad, None


@dataclass(frozen=True)
class FormulaKernel:
    """Attention [b, h, s, d] with a score matrix in memory, for what no fused kernel has."""

    bias: Tensor | None
    causal: bool
    scale: float
    softcap: float | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and its log-sum-exp [b, h, s]."""
        scores, _ = self._scores(query, key)
        log_sum = scores.logsumexp(-1)
        shares = (scores - log_sum.unsqueeze(-1)).exp().to(value.dtype)
        return shares @ _for_heads(value, query.size(1)), log_sum

    def backward(
        self, grad: Tensor, out: Tensor, log_sum: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        groups = key.size(1)
        scores, slope = self._scores(query, key)
        shares = scores.sub_(log_sum.unsqueeze(-1)).exp_()
        grad = grad.to(shares.dtype)
        lost = (grad * out).sum(-1, keepdim=True)
        # changed in place, because a score matrix is what takes the memory
        inner = grad @ _for_heads(value, query.size(1)).to(shares.dtype).mT
        inner.sub_(lost).mul_(shares).mul_(slope).mul_(self.scale)
        q_grad = inner @ _for_heads(key, query.size(1)).to(shares.dtype)
        by_head = (inner.mT @ query.to(shares.dtype), shares.mT @ grad)
        k_grad, v_grad = (part.unflatten(1, (groups, -1)).sum(2) for part in by_head)
        return q_grad, k_grad, v_grad

    def _scores(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return scores in at least fp32, -inf for hidden keys, and their derivative by the scores without a cap."""
        products = query @ _for_heads(key, query.size(1)).mT
        scores = products.to(_accumulated(query)).mul_(self.scale)
        slope: Tensor | float = 1.0
        if self.softcap is not None:
            capped = scores.div_(self.softcap).tanh_()
            slope = 1 - capped.square()
            scores = capped.mul_(self.softcap)
        if self.causal:
            hidden = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
            scores.masked_fill_(hidden, float("-inf"))
        if self.bias is not None:
            scores.add_(self.bias)
        return scores, slope


@dataclass(frozen=True)
class BatchedFlashKernel:
    """PyTorch's variable-length kernel for [b, h, s, d], without a mask or with a causal square."""

    causal: bool
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and its log-sum-exp [b, h, s]."""
        rows = [_by_token(part) for part in (query, key, value)]
        out, log_sum = self._kernel(query, key).forward(*rows)
        batch = query.size(0)
        return out.unflatten(0, (batch, -1)).transpose(1, 2), _by_batch(log_sum, batch)

    def backward(
        self, grad: Tensor, out: Tensor, log_sum: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        rows = [_by_token(part) for part in (grad, out, log_sum, query, key, value)]
        grads = self._kernel(query, key).backward(*rows)
        batch = query.size(0)
        dq, dk, dv = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in grads)
        return dq, dk, dv

    def _kernel(self, query: Tensor, key: Tensor) -> CudaFlashKernel:
        lengths = (query.size(2), key.size(2))
        texts = torch.arange(query.size(0) + 1, device=query.device, dtype=torch.int32)
        bounds = (texts * lengths[0], texts * lengths[1])
        window = (-1, 0) if self.causal else (-1, -1)
        return flash_attention.CudaFlashKernel(bounds, lengths, window, self.scale)


TileKernel = CpuFlashKernel | BatchedFlashKernel | FormulaKernel


def _by_token(by_head: Tensor) -> Tensor:
    """[b, h, s, ...] -> [b * s, h, ...]."""
    return by_head.transpose(1, 2).flatten(0, 1).contiguous()


def _by_batch(by_token: Tensor, batch: int) -> Tensor:
    """[b * s, h] -> [b, h, s]."""
    return by_token.unflatten(0, (batch, -1)).transpose(1, 2)


def _accumulated(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over blocks."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _padded(value: Tensor, query: Tensor) -> Tensor:
    """Pad features with zeros to those of the queries, which fused kernels need."""
    missing = query.size(-1) - value.size(-1)
    return F.pad(value, (0, missing)) if missing > 0 else value


def _for_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [b, g, s, d] for each of ``heads`` query heads."""
    return tensor.repeat_interleave(heads // tensor.size(1), dim=1)


def _tile_of(tile: Tile, q: Tensor, keys: Tensor, values: Tensor) -> QKV:
    return q[:, :, tile.rows], keys[:, :, tile.keys], values[:, :, tile.keys]


def _unpack(packet: Tensor, keys: torch.Size, values: torch.Size) -> tuple[Tensor, Tensor]:
    """Return keys and values of shapes [s, b, g, ...] in a flat tensor as views [b, g, s, ...]."""
    flat = packet.split([prod(keys), prod(values)])
    k, v = (
        part.view(shape).permute(1, 2, 0, 3)
        for part, shape in zip(flat, (keys, values), strict=True)
    )
    return k, v


def _seeing_rows(span: QuerySpan, window: AttentionWindow) -> QuerySpan | None:
    """Return the part of a span whose queries see at least one of its keys."""
    first = 0 if window.right is None else max(0, -window.right - span.position)
    stop = span.rows
    if window.left is not None:
        stop = min(stop, span.keys + window.left - span.position)
    if first >= stop:
        return None
    position = span.position + first
    return QuerySpan(span.row + first, stop - first, position, span.key_row, span.keys)


def _merge(out: Tensor, log_sum: Tensor, tile_out: Tensor, tile_log_sum: Tensor) -> None:
    """Add a tile to the output and log-sum-exp of the same queries, in place."""
    total = torch.logaddexp(log_sum, tile_log_sum)
    out.mul_((log_sum - total).exp().unsqueeze(-1))
    out.add_(tile_out * (tile_log_sum - total).exp().unsqueeze(-1))
    log_sum.copy_(total)
