# SPDX-License-Identifier: Apache-2.0
"""Core attention on PyTorch's scaled_dot_product_attention, for every form that the models need.

Causal and bidirectional, grouped queries, sliding windows, custom scale, soft-capping, sinks, an arbitrary mask,
packed sequences, dropout, and context parallelism by all-gather or all-to-all. Shapes follow Megatron-Core: s is
the (local) sequence, b the batch, t the tokens of a packed row, h and g the query and key heads of this tensor
parallel rank.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
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
from torch.utils.checkpoint import checkpoint

from megatron.bridge.backends import context_parallel, flash_attention, sink_attention
from megatron.bridge.backends.attention_tiles import (
    MASKED_ROWS,
    Run,
    Segment,
    Sight,
    Tile,
    packed_runs,
    packed_segments,
    take,
    tile_biases,
    tiles,
    whole_sequence,
    zigzag_runs,
)
from megatron.bridge.backends.sink_attention import CpuKernel
from megatron.bridge.utils.errors import UserError

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_SCORES = 2**24  # numbers in the score matrix of a tile that is computed here: 64 MB


class TorchAttention(MegatronModule):
    """What Megatron-Core calls ``core_attention``: softmax(scale * q k^T) v, head by head."""

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
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group: dist.ProcessGroup = groups.tp
        self.cp_group: dist.ProcessGroup | None = groups.cp if config.context_parallel_size > 1 else None
        self.attn_mask_type = attn_mask_type
        width = k_channels or config.kv_channels
        assert width is not None, "Megatron-Core derives kv_channels from the hidden size"
        self.scale = 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale
        self.softcap: float | None = getattr(config, "attn_logit_softcapping", None)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = _window(config, layer_number)
        self.cp_comm_type = self._checked_cp_comm_type(cp_comm_type)
        self.current_max_attn_logits = None
        if config.qk_clip or config.log_max_attention_logit:
            raise UserError("qk_clip and log_max_attention_logit need backend='transformer_engine'")
        self._make_sinks()

    def _checked_cp_comm_type(self, kind: str | None) -> str:
        if self.cp_group is None or kind is None:
            return "all_gather"
        if kind not in ("all_gather", "a2a"):
            raise UserError(
                f"cp_comm_type={kind!r} needs backend='transformer_engine'; the torch backend has 'all_gather' "
                "and 'a2a'"
            )
        return kind

    def _make_sinks(self) -> None:
        """A logit per head that takes part in the softmax and has no value: learned, or 0 (off-by-one)."""
        config, ranks = self.config, self.tp_group.size()
        heads = config.num_attention_heads // ranks
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.softmax_offset: torch.Tensor | None = None
        if config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(heads, device=device, dtype=config.params_dtype)
        elif config.softmax_type == "learnable":
            everywhere = torch.empty(heads * ranks, device=device, dtype=config.params_dtype)
            if config.perform_initialization:  # all heads on all ranks: the draw is the same under any layout
                config.init_method(everywhere)  # type: ignore[misc]
            mine = everywhere.split(heads)[self.tp_group.rank()].clone()
            self.softmax_offset = torch.nn.Parameter(mine)
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    # ----------------------------------------------------------------------------------------------------- forward

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, h, d], or [t, h, d] for packed sequences.
            key: [s, b, g, d] or [t, g, d].
            value: [s, b, g, dv] or [t, g, dv].
            attention_mask: Boolean, true where a key is hidden (Megatron's sense), broadcastable to [b, h, s, s];
                hides in addition to what ``attn_mask_type`` and the window hide.
            attn_mask_type: Causal or not; the layer's own if None.
            attention_bias: Not supported.
            packed_seq_params: Where the sequences of a packed row begin.

        Returns:
            [s, b, h * dv] or [t, h * dv]. A query that sees no key (padding) gets zeros.
        """
        assert attention_bias is None, "the torch backend has no attention bias"
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            assert attention_mask is None, "packed sequences are masked by their lengths alone"
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        sight = self._sight(attn_mask_type or self.attn_mask_type)
        outer = self._attend_parallel if self._cp(packed_seq_params) else self._attend_here
        out = outer(query, key, value, attention_mask, sight, packed_seq_params if packed else None)
        out = out.flatten(2)
        return out.squeeze(1) if packed else out

    def _sight(self, mask_type: AttnMaskType) -> Sight:
        left, right = self.window or (-1, -1)
        causal = mask_type in _CAUSAL
        return Sight(None if left < 0 else left, 0 if causal else (None if right < 0 else right))

    def _cp(self, packed: PackedSeqParams | None) -> dist.ProcessGroup | None:
        """The context parallel group; a packed row may bring its own, or none for a row that is not split."""
        if packed is not None and packed.local_cp_size is not None:
            return packed.cp_group
        return self.cp_group

    def _attend_here(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sight: Sight,
        packed: PackedSeqParams | None,
    ) -> torch.Tensor:
        if packed is None:
            runs = whole_sequence(query.size(0), key.size(0))
        elif self._flash(query, sight) and packed.cu_seqlens_q_padded is None:
            values = value.size(-1)
            value = _as_wide_as(value, query)
            bounds, longest = packed.cu_seqlens_q, packed.max_seqlen_q
            how = (sight, self.scale, self.softmax_offset)
            return flash_attention.attend_packed(query, key, value, bounds, int(longest), *how)[..., :values]
        else:
            runs = packed_runs(*packed_segments(packed))
        return self._attend(query, key, value, mask, runs, sight, self.softmax_offset)

    def _flash(self, query: torch.Tensor, sight: Sight) -> bool:
        """Whether the flash kernel for sequences of any lengths computes this without a mask."""
        dropout = self.dropout if self.training else 0.0
        return (
            self.softcap is None
            and dropout == 0.0
            and flash_attention.has_form(sight)
            and flash_attention.runs_here(query)
        )

    def _attend_parallel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sight: Sight,
        packed: PackedSeqParams | None,
    ) -> torch.Tensor:
        group = self._cp(packed)
        assert group is not None
        total = query.size(0) * group.size()
        parts = packed_segments(packed)[0] if packed else [Segment(0, total, total)]
        assert sum(part.padded for part in parts) == total, "packed rows under context parallelism need no tail"
        if self.cp_comm_type == "all_gather":
            key, value = (context_parallel.gather_sequence(tensor, parts, group) for tensor in (key, value))
            runs = zigzag_runs(parts, group.rank(), group.size())
            return self._attend(query, key, value, mask, runs, sight, self.softmax_offset)
        return self._attend_by_heads(query, key, value, mask, sight, parts, group)

    def _attend_by_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sight: Sight,
        parts: list[Segment],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """All tokens of a share of the heads, between two all-to-all exchanges."""
        if mask is not None:
            raise UserError("cp_comm_type='a2a' cannot split an attention mask; use 'all_gather', or no mask")
        heads, kv_heads, size = query.size(2), key.size(2), group.size()
        repeats = context_parallel.repeats_for_heads(kv_heads, heads, size)
        if repeats is None:
            raise UserError(
                f"cp_comm_type='a2a' cannot share {heads} query and {kv_heads} key heads (of one tensor parallel "
                f"rank) among context_parallel_size={size} ranks; use 'all_gather'"
            )
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        query, key, value = (
            context_parallel.sequence_to_heads(tensor, parts, group) for tensor in (query, key, value)
        )
        sinks = self.softmax_offset
        if sinks is not None:
            sinks = sinks.split(heads // size)[group.rank()]
        out = self._attend(query, key, value, None, packed_runs(parts, parts), sight, sinks)
        return context_parallel.heads_to_sequence(out, parts, group)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        runs: list[Run],
        sight: Sight,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[s, b, h, dv] from queries and natural-order keys, tile by tile."""
        values = value.size(-1)
        value = _as_wide_as(value, query)
        beyond_sdpa = len(runs) > 1 or sight.left is not None or sinks is not None
        if beyond_sdpa and mask is None and self._flash(query, sight):
            return flash_attention.attend_runs(query, key, value, runs, sight, self.scale, sinks)[..., :values]
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        kernel = _Kernel(self.scale, self.softcap, sinks, self.dropout if self.training else 0.0)
        limit = kernel.limit(q, k, masked=mask is not None)
        plan = [tile for run in runs for tile in tiles(run, sight, limit)]
        columns = zip(
            take(q, [tile.rows for tile in plan]),
            take(k, [tile.keys for tile in plan]),
            take(v, [tile.keys for tile in plan]),
            tile_biases(plan, sight, q),
            [None if mask is None else _hidden(mask, tile) for tile in plan],
            [tile.causal for tile in plan],
            strict=True,
        )
        with self._dropout_rng(kernel.dropout):
            pieces = [(tile.rows, kernel(*parts)) for tile, parts in zip(plan, columns, strict=True)]
        return _assembled(pieces, query.size(0), q)[..., :values]

    def _dropout_rng(self, dropout: float) -> contextlib.AbstractContextManager[Any]:
        """Under sequence parallelism the whole layer already runs in this state."""
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        tracker = tensor_parallel.get_cuda_rng_tracker()
        assert tracker is not None, "dropout needs model_parallel_cuda_manual_seed"
        return tracker.fork()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sinks, split over tensor parallel ranks, if they are learned."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


# -------------------------------------------------------------------------------------------------- helpers


def _window(config: TransformerConfig, layer_number: int) -> tuple[int, int] | None:
    """How far this layer's queries see back and ahead (-1: without limit), if it is one with a window."""
    skip: Any = config.window_attn_skip_freq
    if config.window_size is None or not is_layer_window_attention(config.window_size, skip, layer_number):
        return None
    left, right = config.window_size
    return left, right


def _as_wide_as(value: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Values with zeros behind them: fused kernels want them as wide as keys."""
    lack = query.size(-1) - value.size(-1)
    return F.pad(value, (0, lack)) if lack > 0 else value


def _hidden(mask: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The tile's part of the caller's mask."""
    rows = slice(None) if mask.size(-2) == 1 else tile.rows
    return mask[..., rows, tile.keys].to(torch.bool)


def _assembled(pieces: list[tuple[slice, torch.Tensor]], total: int, like: torch.Tensor) -> torch.Tensor:
    """[s, b, h, d] from the tiles' [b, h, rows, d], with zeros for queries in no tile."""
    batch, heads, _, width = like.shape
    blocks, at = [], 0
    for rows, piece in [*pieces, (slice(total, total), None)]:
        if rows.start > at:
            blocks.append(like.new_zeros(rows.start - at, batch, heads, width))
        if piece is not None:
            blocks.append(piece.permute(2, 0, 1, 3))
        at = rows.stop
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


@dataclass(frozen=True)
class _Kernel:
    """Attention of one tile: PyTorch's fused kernel, or the formula itself where that has no form for it."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    dropout: float

    def fused(self, device: torch.device) -> bool:
        """Whether one of PyTorch's kernels runs this without a score matrix in memory."""
        if self.softcap is not None:
            return False
        if self.sinks is not None:
            return self.dropout == 0.0 and device.type == "cpu"
        return self.dropout == 0.0 or device.type == "cuda"

    def limit(self, q: torch.Tensor, k: torch.Tensor, masked: bool) -> int | None:
        """Highest tile: bounds the scores, or the mask, that exist at one time."""
        if not self.fused(q.device):
            return max(16, _SCORES // (q.size(0) * q.size(1) * k.size(2)))
        return MASKED_ROWS if masked else None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        hidden: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        """[b, h, rows, d]; ``bias`` is [rows, keys], ``hidden`` boolean, broadcastable to [b, h, rows, keys]."""
        if hidden is None:  # of tiles alone, every row sees a key
            return self._attend(q, k, v, bias, causal)
        if causal:
            hidden = hidden | ~q.new_ones(q.size(2), k.size(2), dtype=torch.bool).tril_()
        elif bias is not None:
            hidden = hidden | (bias < 0)
        # A row of the caller's mask may hide every key: softmax is undefined there, and kernels differ.
        nothing = hidden.all(-1, keepdim=True)
        bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden & ~nothing, float("-inf"))
        return self._attend(q, k, v, bias, False).masked_fill(nothing, 0.0)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        if self.fused(q.device):
            if self.sinks is not None:
                return sink_attention.attend(q, k, v, self.sinks, CpuKernel(bias, causal, self.scale))
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
        if causal:
            bias = q.new_full((q.size(2), k.size(2)), float("-inf")).triu_(1)
        # Computed again in the backward pass: only one tile's scores are ever in memory.
        out = checkpoint(
            self._formula, q, k, v, bias, self.sinks, use_reentrant=False, preserve_rng_state=self.dropout > 0.0
        )
        assert isinstance(out, torch.Tensor)
        return out

    def _formula(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, heads, rows, width = q.shape
        groups, keys = k.size(1), k.size(2)
        grouped = q.reshape(batch, groups, heads // groups * rows, width)
        scores = (grouped @ k.transpose(-1, -2)).float().mul(self.scale).view(batch, heads, rows, keys)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if bias is not None:
            scores = scores + bias
        if sinks is not None:
            column = sinks.float().view(1, heads, 1, 1).expand(batch, heads, rows, 1)
            scores = torch.cat((scores, column), dim=-1)
        shares = F.dropout(scores.softmax(-1)[..., :keys], self.dropout)
        return (shares.to(v.dtype).view(batch, groups, -1, keys) @ v).view(batch, heads, rows, -1)
