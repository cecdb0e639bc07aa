# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of DeepSeek-V3.2 (DSA), in plain PyTorch.

A small indexer scores all keys that a query may see, and attention sees the ``dsa_indexer_topk`` best of them. Each
head h of the indexer has a query q and a weight w, and all heads share one key k:

    score(t, s) = sum_h w_t,h relu(q_t,h k_s)

The choice has no gradient. The loss of the indexer is ``dsa_indexer_loss_coeff`` times the divergence of its scores'
softmax from the attention probabilities, averaged over heads (DeepSeek-V3.2, 2025, section 2.1). Its gradient does not
reach the rest of the model. Texts of up to ``dsa_indexer_topk`` tokens have dense attention.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import RotaryEmbedding, apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    is_dsa_skip_topk_layer,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.bridge.backends.attention.block_mask import (
    QKV,
    AttentionWindow,
    PackedSegment,
    QuerySpan,
    packed_segments,
    padded_cu_seqlens,
)
from megatron.bridge.backends.attention.context_parallel import gather_sequence
from megatron.bridge.backends.attention.torch_attention import TorchAttention
from megatron.bridge.backends.decoding.attention_cache import AttentionCache

_SCORES = 2**24  # scores of all heads that are in memory at a time: 64 MB


def is_sparse(config: Any) -> bool:
    return config.experimental_attention_variant == "dsa"


def takes_over(layer: int, offset: int, every: int) -> bool:
    """Return whether a layer, counted from 1, has no indexer; every ``every``-th layer from ``offset`` on has one."""
    return is_dsa_skip_topk_layer(layer, offset, every)


class Index(NamedTuple):
    """Queries, keys and weights that the indexer computes from tokens."""

    queries: Tensor  # [s, b, h, d]
    keys: Tensor  # [t, b, d]
    weights: Tensor  # [s, b, h], in fp32


class Indexer(MegatronModule):
    """The indexer of a layer, the same on tensor-parallel ranks; ``cache`` has earlier keys while the model decodes."""

    cache: AttentionCache | None = None

    def __init__(self, config: Any, groups: Any) -> None:
        super().__init__(config=config)
        self.groups = groups
        heads = config.dsa_indexer_n_heads
        width = config.dsa_indexer_head_dim
        sizes: Any = {
            "device": None if config.use_cpu_initialization else torch.cuda.current_device()
        }
        sizes["dtype"] = config.params_dtype
        self.linear_wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False, **sizes)
        self.linear_wk = nn.Linear(config.hidden_size, width, bias=False, **sizes)
        self.k_norm = nn.LayerNorm(
            width, config.dsa_indexer_k_norm_epsilon or config.layernorm_epsilon, **sizes
        )
        self.linear_weights_proj = nn.Linear(config.hidden_size, heads, bias=False, **sizes)
        if config.perform_initialization:
            for linear in (self.linear_wq_b, self.linear_wk, self.linear_weights_proj):
                config.init_method(linear.weight)
        rotated = config.qk_pos_emb_head_dim
        self.rotary_pos_emb = RotaryEmbedding(
            rotated, 1.0, rotary_base=config.rotary_base, cp_group=groups.cp
        )

    def forward(self, x: Tensor, latent: Tensor, packed: PackedSeqParams | None = None) -> Index:
        """Compute the index of hidden states [s, b, hidden] and the normalized latents of their queries."""
        config: Any = self.config
        tp = self.groups.tp
        latent = latent.view(*x.shape[:2], -1)
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, x, config, packed)  # type: ignore[arg-type]
        if config.sequence_parallel and tp.size() > 1:
            x, latent = (
                gather_from_sequence_parallel_region(part, group=tp) for part in (x, latent)
            )
        angles: Any = self.rotary_pos_emb(length, packed_seq=packed is not None)
        queries = self.linear_wq_b(latent).unflatten(-1, (config.dsa_indexer_n_heads, -1))
        keys = self.k_norm(self.linear_wk(x)).unsqueeze(2)
        queries, keys = (self._rotate(part, angles, packed) for part in (queries, keys))
        scale = (config.dsa_indexer_n_heads * config.dsa_indexer_head_dim) ** -0.5
        return Index(queries, keys.squeeze(2), self.linear_weights_proj(x).float() * scale)

    def _rotate(self, x: Tensor, angles: Any, packed: PackedSeqParams | None) -> Tensor:
        """Rotate the first features of [s, b, h, d] by the positions of the tokens."""
        angles, factor = angles if isinstance(angles, tuple) else (angles, 1.0)
        config: Any = self.config
        turned, plain = x.tensor_split([config.qk_pos_emb_head_dim], dim=-1)
        options = {"mscale": factor, "cp_group": self.groups.cp}
        options["mla_rotary_interleaved"] = config.dsa_indexer_rope_interleaved
        if packed is None or self.cache is not None:
            turned = apply_rotary_pos_emb(turned, angles[: len(x)], config, **options)
        else:
            bounds = padded_cu_seqlens(packed)
            turned = apply_rotary_pos_emb(
                turned.squeeze(1), angles, config, bounds, **options
            ).unsqueeze(1)
        return torch.cat((turned, plain), dim=-1)

    def scores(self, index: Index, later: Tensor) -> Tensor:
        """Compute scores [b, queries, keys] in fp32; -inf for keys that are ``later`` [queries, keys]."""
        scores = torch.einsum("sbhd,tbd->bsht", index.queries.float(), index.keys.float())
        if self.config.dsa_indexer_scoring_relu:
            scores = scores.relu()
        scores = torch.einsum("bsht,sbh->bst", scores, index.weights)
        return scores.masked_fill(later, -torch.inf)


class SparseAttention(TorchAttention):
    """Attention to the keys that the indexer of this layer, or of an earlier layer, chooses.

    Attributes:
        hidden: boolean [b, 1, s, t], true for keys that were not chosen in the last pass; None if all were.
        masks: the same for each span while the model decodes.
        source: the attention whose choice this layer uses; empty if it has an indexer.
    """

    requires_dsa_inputs = (
        True  # makes Megatron-Core's layer pass hidden states and the latents of queries
    )

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.layer_number = layer_number
        offset = config.dsa_indexer_skip_topk_offset
        every = config.dsa_indexer_topk_freq
        self.indexer = (
            None
            if takes_over(layer_number, offset, every)
            else Indexer(config, kwargs["pg_collection"])
        )
        self.source: list[SparseAttention] = []  # in a list, so that it does not become a submodule
        self.hidden: Tensor | None = None
        self._index: Index | None = None

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        x: Tensor,
        qr: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Tensor:
        """Extend ``TorchAttention.forward`` by hidden states ``x`` and the latents ``qr`` of their queries."""
        with torch.set_grad_enabled(self._learns):
            index = self.indexer and self.indexer(x.detach(), qr.detach(), packed_seq_params)
            self._index = index and self._with_all_keys(index, packed_seq_params)
        if self.cache is not None:
            self._index, self.masks = None, self._masks(index) if index else self.source[0].masks
        return super().forward(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params, **options
        )

    @property
    def _learns(self) -> bool:
        return (
            self.training and torch.is_grad_enabled() and bool(self.config.dsa_indexer_loss_coeff)
        )

    def _with_all_keys(self, index: Index, packed: PackedSeqParams | None) -> Index:
        """Return the index with the keys of all context-parallel ranks, in natural order."""
        group = self._cp(packed)
        if group is None:
            return index
        total = len(index.keys) * group.size()
        parts = packed_segments(packed)[0] if packed else [PackedSegment(0, total, total)]
        return index._replace(
            keys=gather_sequence(index.keys.unsqueeze(2), parts, group).squeeze(2)
        )

    def _attend(
        self,
        qkv: QKV,
        mask: Tensor | None,
        spans: list[QuerySpan],
        window: AttentionWindow,
        sinks: Tensor | None,
    ) -> Tensor:
        if self.cache is not None:
            return super()._attend(qkv, mask, spans, window, sinks)
        index = self._index
        self._index = None
        self.hidden = self._choose(index, spans) if index else self.source[0].hidden
        hidden = (
            self.hidden if mask is None else mask if self.hidden is None else mask | self.hidden
        )
        out = super()._attend(qkv, hidden, spans, window, sinks)
        if index is None or not self._learns:
            return out
        return DSAIndexerLossAutoScaler.apply(
            out, self._loss(index, qkv[0].detach(), qkv[1].detach(), spans)
        )

    @torch.no_grad()
    def _choose(self, index: Index, spans: list[QuerySpan]) -> Tensor | None:
        """Return a boolean [b, 1, s, t], true if a key is not among the best of a query; None if all are."""
        best: Any = self.config.dsa_indexer_topk
        if all(span.keys <= best for span in spans):
            return None
        rows, batch = index.weights.shape[:2]
        hidden = index.weights.new_ones(batch, rows, len(index.keys), dtype=torch.bool)
        for rows_of_block, keys, part, later in self._blocks(index, spans):
            chosen = self._scores(part, later).topk(min(best, len(part.keys)), dim=-1).indices
            hidden[:, rows_of_block, keys].scatter_(-1, chosen, False)
        return hidden.unsqueeze(1)

    def _scores(self, part: Index, later: Tensor) -> Tensor:
        assert self.indexer is not None
        return self.indexer.scores(part, later)

    def _blocks(
        self, index: Index, spans: list[QuerySpan]
    ) -> Iterator[tuple[slice, slice, Index, Tensor]]:
        """Yield rows and keys of blocks of queries, their part of the index, and a mask of later keys."""
        for span in spans:
            keys = slice(span.key_row, span.key_row + span.keys)
            height = max(1, _SCORES // (index.weights[0].numel() * span.keys))
            for first in range(0, span.rows, height):
                rows = slice(span.row + first, span.row + min(first + height, span.rows))
                part = Index(index.queries[rows], index.keys[keys], index.weights[rows])
                later = part.keys.new_ones(len(part.queries), span.keys, dtype=torch.bool)
                yield rows, keys, part, later.triu_(span.position + first + 1)

    def _masks(self, index: Index) -> list[Tensor | None]:
        """Store the new keys of a decoding step, and return the mask of each span: true for keys it does not see."""
        assert self.indexer is not None
        cache = self.indexer.cache
        assert cache is not None
        cache.store(index.keys, index.keys[..., :0])
        masks = []
        for span in cache.step.spans:
            rows = slice(span.row, span.row + span.count)
            stop = span.start + span.count
            part = Index(
                index.queries[rows],
                cache.keys[span.extent : span.extent + stop],
                index.weights[rows],
            )
            masks.append(self._choose(part, [QuerySpan(0, span.count, span.start, 0, stop)]))
        return masks

    def _loss(self, index: Index, query: Tensor, key: Tensor, spans: list[QuerySpan]) -> Tensor:
        """Compute the divergence of the indexer from attention, summed or averaged over queries."""
        config: Any = self.config
        total = index.weights.new_zeros(())
        for rows, keys, part, later in self._blocks(index, spans):
            unseen = later.expand(query.size(1), *later.shape)
            if config.dsa_indexer_use_sparse_loss and self.hidden is not None:
                unseen = unseen | self.hidden[:, 0, rows, keys]
            target = self._attention(query[rows], key[keys], unseen)
            # recomputed in the backward pass; otherwise the scores of all heads would stay in memory
            part_of_all: Any = checkpoint(
                self._divergence, part, target, unseen, use_reentrant=False
            )
            total = total + part_of_all
        queries = query.size(1) * sum(span.rows for span in spans)
        mean = total / queries
        layers = config.num_layers + (config.mtp_num_layers or 0)
        tracker: Any = get_moe_metrics_tracker()
        tracker.record("indexer_loss", mean.detach(), self.layer_number, layers)
        count = total.new_full((), queries)
        tracker.record_weighted("indexer_loss", total, count, self.layer_number, layers)
        return (total if config.calculate_per_token_loss else mean) * config.dsa_indexer_loss_coeff

    @torch.no_grad()
    def _attention(self, query: Tensor, key: Tensor, unseen: Tensor) -> Tensor:
        """Compute the attention probabilities [b, queries, keys], averaged over all heads."""
        given = query.new_zeros(unseen.shape, dtype=torch.float32)
        for head in range(query.size(2)):
            scores = (
                torch.einsum("sbd,tbd->bst", query[:, :, head].float(), key[:, :, head].float())
                * self.scale
            )
            given += scores.masked_fill(unseen, -torch.inf).softmax(-1)
        if self.tp_group.size() > 1:
            dist.all_reduce(given, group=self.tp_group)
        return given / given.sum(-1, keepdim=True)

    def _divergence(self, part: Index, target: Tensor, unseen: Tensor) -> Tensor:
        scores = self._scores(part, unseen).log_softmax(-1).masked_fill(unseen, 0.0)
        return (torch.xlogy(target, target) - target * scores).sum()


def link_shared(model: nn.Module) -> None:
    """Connect each attention without an indexer to the last one before it that has one."""
    last: SparseAttention | None = None
    for module in model.modules():
        if isinstance(module, SparseAttention):
            last = last if module.indexer is None else module
            assert last is not None, "checked before the model was built"
            module.source = [] if module.indexer else [last]
