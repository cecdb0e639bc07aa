# SPDX-License-Identifier: Apache-2.0
"""Core attention on PyTorch's scaled_dot_product_attention, in every form that the models need.

Causal and bidirectional, grouped queries, sliding windows, custom scale, soft-capping, sinks, an arbitrary mask, packed
sequences, dropout, and context parallelism by all-gather, by all-to-all, in a ring, or both. Shapes follow
Megatron-Core: s is the (local) sequence, b the batch, t the tokens of a packed row, h and g the query and key heads of
this tensor-parallel rank.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.bridge.backends.attention import context_parallel, flash_attention, sink_attention
from megatron.bridge.backends.attention.block_mask import (
    CPU_SCORES,
    CUDA_SCORES,
    MASKED_ROWS,
    QKV,
    AttentionWindow,
    PackedSegment,
    QuerySpan,
    Tile,
    chunk_spans,
    hidden_ahead,
    is_mask_of_valid_tokens,
    looking_ahead,
    packed_segments,
    packed_spans,
    slice_sequence,
    tile_biases,
    tiles,
    whole_sequence,
    zigzag_spans,
)
from megatron.bridge.backends.attention.largest_scores import largest_scores
from megatron.bridge.backends.attention.ring_attention import Ring, zigzag_chunks
from megatron.bridge.backends.attention.shared_sequences import group_of_row
from megatron.bridge.backends.attention.sink_attention import CpuFlashKernel
from megatron.bridge.backends.decoding.attention_cache import AttentionCache
from megatron.bridge.utils.errors import UserError

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
CP_KINDS = ("all_gather", "a2a", "p2p", "a2a+p2p")
RING_KINDS = ("p2p", "a2a+p2p")  # values of ``cp_comm_type`` for which keys and values travel


class TorchAttention(MegatronModule):
    """Megatron-Core's ``core_attention``: softmax(scale * q k^T) v for each head.

    Attributes:
        cache: keys and values of earlier tokens while the model decodes, else None.
        masks: the keys that each span of a decoding step does not see, in addition to later keys.
        extra_key_width: features that a hook adds to queries and keys.
    """

    cache: AttentionCache | None = None
    masks: list[Tensor | None] | None = None
    extra_key_width: int = 0

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(
            required_pgs=["tp", "cp"]
        )
        self.tp_group: dist.ProcessGroup = groups.tp
        self.cp_group: dist.ProcessGroup | None = (
            groups.cp if config.context_parallel_size > 1 else None
        )
        self.attn_mask_type = attn_mask_type
        width = k_channels or config.kv_channels
        assert width is not None, "Megatron-Core derives kv_channels from the hidden size"
        self.scale = 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale
        self.softcap: float | None = getattr(config, "attn_logit_softcapping", None)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window_size = _window_size(config, layer_number)
        self.chunk_size: int | None = None
        if self.window_size is not None and getattr(config, "chunked_attention", False):
            self.chunk_size = self.window_size[0] + 1
        self.cp_comm_type = self._checked_cp_comm_type(cp_comm_type)
        # the largest score of each head since the last step; ``clip_qk`` of Megatron-Core reads it
        self.current_max_attn_logits: Tensor | None = None
        if config.log_max_attention_logit:
            raise UserError("log_max_attention_logit needs backend='transformer_engine'")
        self._make_sinks()

    def _checked_cp_comm_type(self, kind: str | None) -> str:
        if kind is None or (self.cp_group is None and not self.config.hybrid_context_parallel):
            return "all_gather"
        if kind not in CP_KINDS:
            raise UserError(f"cp_comm_type={kind!r} is not one of {', '.join(CP_KINDS)}")
        if kind in RING_KINDS and self.dropout > 0.0:
            raise UserError(
                f"attention_dropout={self.dropout} with cp_comm_type={kind!r}: a ring computes blocks again in the "
                "backward pass, set attention_dropout=0, or cp_comm_type='all_gather'"
            )
        if kind == "a2a+p2p" and not self.config.hierarchical_context_parallel_sizes:
            raise UserError(
                "cp_comm_type='a2a+p2p' needs hierarchical_context_parallel_sizes: set two sizes"
            )
        return kind

    def _make_sinks(self) -> None:
        """Create one logit per head for the softmax denominator: learned, or 0 (off-by-one)."""
        config = self.config
        ranks = self.tp_group.size()
        heads = config.num_attention_heads // ranks
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.softmax_offset: Tensor | None = None
        if config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(heads, device=device, dtype=config.params_dtype)
        elif config.softmax_type == "learnable":
            all_heads = torch.empty(heads * ranks, device=device, dtype=config.params_dtype)
            if (
                config.perform_initialization
            ):  # all heads on every rank: the same values under any layout
                config.init_method(all_heads)  # type: ignore[misc]
            local_heads = all_heads.split(heads)[self.tp_group.rank()].clone()
            self.softmax_offset = torch.nn.Parameter(local_heads)
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute attention: [s, b, h * dv] or [t, h * dv], zeros for a query that sees no key (padding).

        Args:
            query: [s, b, h, d], or [t, h, d] for packed sequences.
            key: [s, b, g, d] or [t, g, d].
            value: [s, b, g, dv] or [t, g, dv].
            attention_mask: Boolean, true where a key is masked out (as in Megatron), broadcastable to
                [b, h, s, s]; applies in addition to ``attn_mask_type`` and the window. Or integers [b, s]: the
                number of later positions that each query sees, instead of ``attn_mask_type``; a window still limits
                the earlier positions. Booleans [b, s] say which tokens are valid, as RL frameworks pass them to
                Transformer Engine; causal attention ignores them, as it does there, because padding comes last.
            attn_mask_type: Causal or not; None uses the layer's type.
            attention_bias: Not supported.
            packed_seq_params: The bounds of the sequences of a packed row.
        """
        assert attention_bias is None, "the torch backend has no attention bias"
        if self.cache is not None:
            return self.cache.attend(self, query, key, value)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            assert attention_mask is None or attention_mask.dtype != torch.bool, (
                "packed rows have no mask"
            )
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        if attention_mask is not None and is_mask_of_valid_tokens(attention_mask):
            self._check_valid_tokens(attention_mask, attn_mask_type or self.attn_mask_type)
            attention_mask = None
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            attention_mask = self.ahead_of_layer(attention_mask)
        window = self._mask_window(attn_mask_type or self.attn_mask_type)
        attention_mask, window = looking_ahead(attention_mask, window)
        attend = self._attend_parallel if self._cp(packed_seq_params) else self._attend_local
        out = attend(
            (query, key, value), attention_mask, window, packed_seq_params if packed else None
        ).flatten(2)
        return out.squeeze(1) if packed else out

    def ahead_of_layer(self, ahead: Tensor | None) -> Tensor | None:
        """Return ``ahead``, the number of later tokens that each token sees, or None if the layer is causal."""
        is_causal = self.window_size is None and not getattr(
            self.config, "bidirectional_full_layers", True
        )
        return None if is_causal else ahead

    def _check_valid_tokens(self, valid: Tensor, mask_type: AttnMaskType) -> None:
        """Refuse a mask [b, s] of valid tokens that changes what valid tokens see."""
        if mask_type not in _CAUSAL:
            raise UserError(
                f"an attention mask of valid tokens [batch, sequence] needs causal attention, this layer has "
                f"{mask_type.name}: pass one that is true where a key is hidden, [batch, 1, 1, sequence]"
            )
        # a GPU is not asked, because it would have to wait for the mask in each layer
        if valid.device.type == "cpu" and bool((valid[:, 1:] & ~valid[:, :-1]).any()):
            raise UserError(
                "the attention mask of valid tokens [batch, sequence] has padding before a valid token, which would "
                "see it: put the padding at the end"
            )

    def first_key(self, position: Any) -> Any:
        """Return the position of the first key that the query at ``position``, a number or a tensor, sees."""
        if self.chunk_size is not None:
            return position - position % self.chunk_size
        left = self._mask_window(self.attn_mask_type).left
        if left is None:
            return position * 0
        return (position - left) * (position > left)

    def _mask_window(self, mask_type: AttnMaskType) -> AttentionWindow:
        left, right = (-1, -1) if self.chunk_size is not None else self.window_size or (-1, -1)
        causal = mask_type in _CAUSAL
        return AttentionWindow(
            None if left < 0 else left, 0 if causal else (None if right < 0 else right)
        )

    def _cp(self, packed: PackedSeqParams | None) -> dist.ProcessGroup | None:
        """Return the context-parallel group. A packed row may have its own group, or None if it is not split."""
        return group_of_row(packed, self.cp_group)

    def _attend_local(
        self, qkv: QKV, mask: Tensor | None, window: AttentionWindow, packed: PackedSeqParams | None
    ) -> Tensor:
        query, key, value = qkv
        if packed is None:
            spans = whole_sequence(query.size(0), key.size(0))
        elif (
            mask is None
            and not self.config.qk_clip
            and self.takes_packed_rows(query, window)
            and packed.cu_seqlens_q_padded is None
        ):
            values = value.size(-1)
            value = _pad_width(value, query)
            bounds = packed.cu_seqlens_q
            longest = packed.max_seqlen_q
            options = (window, self.scale, self.softmax_offset)
            return flash_attention.attend_packed(query, key, value, bounds, int(longest), *options)[
                ..., :values
            ]
        else:
            spans = packed_spans(*packed_segments(packed))
        return self._attend(qkv, mask, spans, window, self.softmax_offset)

    def _can_use_flash(self, query: Tensor, window: AttentionWindow) -> bool:
        """Return whether the variable-length flash kernel computes this without a mask."""
        dropout = self.dropout if self.training else 0.0
        return (
            self.softcap is None
            and dropout == 0.0
            and flash_attention.supports_window(window)
            and flash_attention.is_supported(query)
        )

    def takes_packed_rows(self, query: Tensor, window: AttentionWindow) -> bool:
        """Return whether one kernel handles all sequences of a packed row of queries like these [..., d]."""
        return self.chunk_size is None and self._can_use_flash(query, window)

    def _attend_parallel(
        self, qkv: QKV, mask: Tensor | None, window: AttentionWindow, packed: PackedSeqParams | None
    ) -> Tensor:
        query, key, value = qkv
        group = self._cp(packed)
        assert group is not None
        total = query.size(0) * group.size()
        parts = packed_segments(packed)[0] if packed else [PackedSegment(0, total, total)]
        assert sum(part.padded for part in parts) == total, (
            "packed rows under context parallelism need no tail"
        )
        if self.cp_comm_type == "all_gather":
            key, value = (
                context_parallel.gather_sequence(tensor, parts, group) for tensor in (key, value)
            )
            spans = zigzag_spans(parts, group.rank(), group.size())
            return self._attend((query, key, value), mask, spans, window, self.softmax_offset)
        if mask is not None:
            raise UserError(
                f"cp_comm_type={self.cp_comm_type!r} cannot split an attention mask; use 'all_gather', or no mask"
            )
        if self.cp_comm_type == "p2p":
            ring = self._ring(group, [[rank] for rank in range(group.size())], parts, window)
            return ring.attend(qkv, self.softmax_offset)
        if self.cp_comm_type == "a2a+p2p":
            return self._attend_hierarchical(qkv, window, parts)
        return self._attend_all_to_all(qkv, window, parts, group)

    def _attend_all_to_all(
        self,
        qkv: QKV,
        window: AttentionWindow,
        parts: list[PackedSegment],
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Compute attention over all tokens for a part of the heads, between two all-to-all exchanges."""
        query, key, value = (
            context_parallel.sequence_to_heads(tensor, parts, group)
            for tensor in self._with_divisible_heads(qkv, group.size())
        )
        sinks = self._sinks_of_rank(group)
        out = self._attend((query, key, value), None, packed_spans(parts, parts), window, sinks)
        return context_parallel.heads_to_sequence(out, parts, group)

    def _attend_hierarchical(
        self, qkv: QKV, window: AttentionWindow, parts: list[PackedSegment]
    ) -> Tensor:
        """Exchange tokens for heads within the first level of ranks, and pass keys and values around the second."""
        levels: Any = parallel_state.get_hierarchical_context_parallel_groups()
        inner, outer = levels
        query, key, value = (
            context_parallel.exchange_rows_for_heads(tensor, inner)
            for tensor in self._with_divisible_heads(qkv, inner.size())
        )
        ranks = range(inner.size() * outer.size())
        # consecutive ranks share the first level
        neighbors = [list(ranks[at : at + inner.size()]) for at in ranks[:: inner.size()]]
        ring = self._ring(outer, neighbors, parts, window)
        out = ring.attend((query, key, value), self._sinks_of_rank(inner))
        return context_parallel.exchange_heads_for_rows(out, inner)

    def _ring(
        self,
        group: dist.ProcessGroup,
        members: list[list[int]],
        parts: list[PackedSegment],
        window: AttentionWindow,
    ) -> Ring:
        """Return the ring of ``group``, whose ranks have the tokens of ``members``, context-parallel ranks each."""
        size = sum(map(len, members))
        chunks = [zigzag_chunks(parts, ranks, size, self.chunk_size) for ranks in members]
        return Ring(group, chunks, window, self.scale, self.softcap)

    def _with_divisible_heads(self, qkv: QKV, size: int) -> QKV:
        """Repeat key and value heads as often as ``size`` ranks need to share them evenly."""
        query, key, value = qkv
        heads = query.size(2)
        kv_heads = key.size(2)
        repeats = context_parallel.repeats_for_heads(kv_heads, heads, size)
        if repeats is None:
            raise UserError(
                f"cp_comm_type={self.cp_comm_type!r} cannot split {heads} query and {kv_heads} key heads (of one "
                f"tensor-parallel rank) among {size} ranks; use 'all_gather'"
            )
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        return query, key, value

    def _sinks_of_rank(self, group: dist.ProcessGroup) -> Tensor | None:
        """Return the sinks of the heads that this rank has after the exchange."""
        if self.softmax_offset is None:
            return None
        return self.softmax_offset.chunk(group.size())[group.rank()]

    def _attend(
        self,
        qkv: QKV,
        mask: Tensor | None,
        spans: list[QuerySpan],
        window: AttentionWindow,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute attention [s, b, h, dv] of queries and keys in natural order, tile by tile."""
        query, key, value = qkv
        values = value.size(-1)
        value = _pad_width(value, query)
        if self.chunk_size is not None:
            spans = chunk_spans(spans, self.chunk_size)
        if self.config.qk_clip and self.training:
            self._note_largest_scores(query, key, spans, window)
        beyond_sdpa = len(spans) > 1 or window.left is not None or sinks is not None
        if beyond_sdpa and mask is None and self._can_use_flash(query, window):
            return flash_attention.attend_spans(
                query, key, value, spans, window, self.scale, sinks
            )[..., :values]
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        kernel = _TileAttention(
            self.scale, self.softcap, sinks, self.dropout if self.training else 0.0
        )
        limit = kernel.limit(q, k, masked=mask is not None)
        cut = [(span, tile) for span in spans for tile in tiles(span, window, limit)]
        plan = [tile for _, tile in cut]
        columns = zip(
            slice_sequence(q, [tile.rows for tile in plan]),
            slice_sequence(k, [tile.keys for tile in plan]),
            slice_sequence(v, [tile.keys for tile in plan]),
            tile_biases(plan, window, q),
            [None if mask is None else _mask_of_tile(mask, span, tile) for span, tile in cut],
            [tile.causal for tile in plan],
            strict=True,
        )
        with self._dropout_rng(kernel.dropout):
            pieces = [
                (tile.rows, kernel(*parts)) for tile, parts in zip(plan, columns, strict=True)
            ]
        return _join_tiles(pieces, query.size(0), q)[..., :values]

    def _note_largest_scores(
        self, query: Tensor, key: Tensor, spans: list[QuerySpan], window: AttentionWindow
    ) -> None:
        largest = largest_scores(query, key, spans, window, self.scale)
        if self.current_max_attn_logits is not None:
            largest = torch.maximum(largest, self.current_max_attn_logits)
        self.current_max_attn_logits = largest

    def _dropout_rng(self, dropout: float) -> contextlib.AbstractContextManager[Any]:
        """Use the RNG state of model-parallel regions. Under sequence parallelism the complete layer runs in it."""
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        tracker = tensor_parallel.get_cuda_rng_tracker()
        assert tracker is not None, "dropout needs model_parallel_cuda_manual_seed"
        return tracker.fork()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the learned sinks as a tensor that is sharded over tensor-parallel ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _window_size(config: TransformerConfig, layer_number: int) -> tuple[int, int] | None:
    """Return the earlier and later positions that queries see (-1: no limit); None for a layer without a window."""
    skip: Any = config.window_attn_skip_freq
    if config.window_size is None or not is_layer_window_attention(
        config.window_size, skip, layer_number
    ):
        return None
    left, right = config.window_size
    return left, right


def _heads_of_queries(tensor: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [b, g, s, d] for each of ``heads`` query heads."""
    repeats = heads // tensor.size(1)
    return tensor.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor


def _pad_width(value: Tensor, query: Tensor) -> Tensor:
    """Pad values with zeros: fused kernels need the width of the keys."""
    missing = query.size(-1) - value.size(-1)
    return F.pad(value, (0, missing)) if missing > 0 else value


def _mask_of_tile(mask: Tensor, span: QuerySpan, tile: Tile) -> Tensor:
    if mask.dtype != torch.bool:
        return hidden_ahead(mask, span, tile)
    rows = slice(None) if mask.size(-2) == 1 else tile.rows
    return mask[..., rows, tile.keys].to(torch.bool)


def _join_tiles(pieces: list[tuple[slice, Tensor]], total: int, like: Tensor) -> Tensor:
    """Join the tiles' [b, h, rows, d] to [s, b, h, d], with zeros for queries in no tile."""
    batch, heads, _, width = like.shape
    blocks = []
    at = 0
    for rows, piece in [*pieces, (slice(total, total), None)]:
        if rows.start > at:
            blocks.append(like.new_zeros(rows.start - at, batch, heads, width))
        if piece is not None:
            blocks.append(piece.permute(2, 0, 1, 3))
        at = rows.stop
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


@dataclass(frozen=True)
class _TileAttention:
    """Compute attention of one tile with PyTorch's fused kernel, or with the formula if no kernel applies."""

    scale: float
    softcap: float | None
    sinks: Tensor | None
    dropout: float

    def fused(self, device: torch.device) -> bool:
        """Return whether a PyTorch kernel computes this without a score matrix in memory."""
        if self.softcap is not None:
            return False
        if self.sinks is not None:
            return self.dropout == 0.0 and device.type == "cpu"
        return self.dropout == 0.0 or device.type == "cuda"

    def limit(self, q: Tensor, k: Tensor, masked: bool) -> int | None:
        """Return the maximum height of a tile, which limits the memory of scores or masks; None means no limit."""
        if not self.fused(q.device):
            scores = CUDA_SCORES if q.is_cuda else CPU_SCORES
            return max(16, scores // (q.size(0) * q.size(1) * k.size(2)))
        return MASKED_ROWS if masked else None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        hidden: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Compute attention [b, h, rows, d] with ``bias`` [rows, keys]; ``hidden`` broadcasts to [b, h, rows, keys]."""
        if hidden is None:  # every row of a tile sees a key
            return self._attend(q, k, v, bias, causal)
        if causal:
            hidden = hidden | ~q.new_ones(q.size(2), k.size(2), dtype=torch.bool).tril_()
        elif bias is not None:
            hidden = hidden | (bias < 0)
        # the caller's mask may hide every key of a row, where softmax is undefined and kernels differ
        nothing = hidden.all(-1, keepdim=True)
        bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(
            hidden & ~nothing, float("-inf")
        )
        return self._attend(q, k, v, bias, False).masked_fill(nothing, 0.0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        if self.fused(q.device):
            if self.sinks is not None:
                return sink_attention.attend(
                    q, k, v, self.sinks, CpuFlashKernel(bias, causal, self.scale)
                )
            if bias is not None and q.is_cuda:
                # with a mask, only the formula has grouped queries there: it keeps the scores of all tiles
                k, v = (_heads_of_queries(tensor, q.size(1)) for tensor in (k, v))
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bias,
                dropout_p=self.dropout,
                is_causal=causal,
                scale=self.scale,
                enable_gqa=q.size(1) != k.size(1),
            )
        # recomputed in the backward pass, so only the scores of one tile are in memory at a time
        out = checkpoint(
            self._formula,
            q,
            k,
            v,
            bias,
            self.sinks,
            causal,
            use_reentrant=False,
            preserve_rng_state=self.dropout > 0.0,
        )
        assert isinstance(out, Tensor)
        return out

    def _formula(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        causal: bool,
    ) -> Tensor:
        batch, heads, rows, width = q.shape
        groups = k.size(1)
        keys = k.size(2)
        grouped = q.reshape(batch, groups, heads // groups * rows, width)
        scores = (
            (grouped @ k.transpose(-1, -2)).float().mul(self.scale).view(batch, heads, rows, keys)
        )
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if causal:
            bias = q.new_full((rows, keys), float("-inf")).triu_(1)
        if bias is not None:
            scores = scores + bias
        if sinks is not None:
            column = sinks.float().view(1, heads, 1, 1).expand(batch, heads, rows, 1)
            scores = torch.cat((scores, column), dim=-1)
        probabilities = F.dropout(scores.softmax(-1)[..., :keys], self.dropout)
        return (probabilities.to(v.dtype).view(batch, groups, -1, keys) @ v).view(
            batch, heads, rows, -1
        )
