# SPDX-License-Identifier: Apache-2.0
"""Keys and values of all requests of one attention layer, and attention of new tokens to them.

A request owns consecutive rows of the cache (its extent), so its keys are a view and nothing is gathered. Attention
runs per request: the result does not depend on the other requests of the step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.bridge.backends.attention import flash_attention
from megatron.bridge.backends.attention.block_mask import AttentionWindow, QuerySpan, looking_ahead
from megatron.bridge.backends.decoding.op_recorder import run_unrecorded
from megatron.bridge.backends.decoding.step import DecodingStep, SingleTokens, TokenSpan
from megatron.bridge.backends.kernels import c_kernels

_New = tuple[
    Tensor, Tensor, Tensor
]  # queries [rows, h, d], keys [rows, g, d], values [rows, g, dv]


class AttentionCache:
    """Keys and values, attached to a ``TorchAttention`` as its ``cache``.

    Args:
        tokens: capacity in tokens for all requests.
        groups: key heads of this rank.
        widths: width of a key and of a value.
    """

    step: DecodingStep

    def __init__(
        self,
        tokens: int,
        groups: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys = torch.empty(tokens, groups, widths[0], dtype=dtype, device=device)
        self.values = torch.empty(tokens, groups, widths[1], dtype=dtype, device=device)

    @staticmethod
    def bytes_per_token(groups: int, widths: tuple[int, int], dtype: torch.dtype) -> int:
        return groups * sum(widths) * dtype.itemsize

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy ``count`` tokens within the cache; the two ranges may overlap."""
        for tensor in (self.keys, self.values):
            tensor[target : target + count] = tensor[source : source + count].clone()

    def attend(self, core: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store new keys and values [rows, 1, g, d], and return attention [rows, 1, h * dv], zeros for padding."""
        new = query[:, 0], key[:, 0], value[:, 0]
        out = query.new_zeros(len(query), query.size(2), self.values.size(2))
        is_single = isinstance(self.step, SingleTokens)
        if is_single and not self.repeats_kernels(core):
            run_unrecorded(partial(self._attend_single_tokens, core), new, out)
            return out.flatten(1).unsqueeze(1)
        masks: list[Tensor | None] = []
        if not is_single:
            masks = core.masks or [core.ahead_of_layer(span.ahead) for span in self.step.spans]
        if self.attends_at_once(core) and all(mask is None for mask in masks):
            self.store(*new[1:])
            form = self.step.extents, _window_of_core(core), core.scale, core.softmax_offset
            tokens = self.step.tokens
            out[:tokens] = flash_attention.attend_extents(
                new[0][:tokens], self.keys, self.values, *form
            )
        elif is_single:
            self._attend_compiled(core, new, (), out)
        else:
            self._attend_spans(core, new, masks, out)
        return out.flatten(1).unsqueeze(1)

    def _attend_single_tokens(self, core: Any, new: _New, out: Tensor) -> None:
        """Attend as in a step that is not replayed."""
        spans = self.step.spans
        self._attend_spans(core, new, [core.ahead_of_layer(span.ahead) for span in spans], out)

    def store(self, key: Tensor, value: Tensor) -> None:
        """Store keys [rows, g, d] and values [rows, g, dv] at the places of the step."""
        tokens = self.step.tokens
        self.keys.index_copy_(0, self.step.places, key[:tokens])
        self.values.index_copy_(0, self.step.places, value[:tokens])

    def _attend_spans(
        self, core: Any, new: _New, masks: Sequence[Tensor | None], out: Tensor
    ) -> None:
        """Attend to the keys of each text, in one call for all texts whose tokens see no later ones."""
        plain = []
        masked_spans = []
        compiles = self._compiles(core)
        for span, mask in zip(self.step.spans, masks, strict=True):
            if compiles and (mask is None or (span.count == 1 and _sees_all(mask))):
                plain.append(span)
            else:
                masked_spans.append((span, mask))
        if masked_spans:
            self.store(*new[1:])
        if plain:
            self._attend_compiled(core, new, plain, out)
        for span, mask in masked_spans:
            visible = slice(
                span.extent + core.first_key(span.start), span.extent + span.start + span.count
            )
            rows = slice(span.row, span.row + span.count)
            out[rows] = _attend_to_keys(
                core, new[0][rows], self.keys[visible], self.values[visible], mask
            )

    def _attend_compiled(
        self, core: Any, new: _New, spans: Sequence[TokenSpan], out: Tensor
    ) -> None:
        """Store the tokens of the spans, or all rows of ``SingleTokens``, and attend to the keys that they see."""
        kind = type(self), core.chunk_size, core.window_size, tuple(span.row for span in spans)
        if kind not in self.step.tables:
            self.step.tables[kind] = self._tables(core, spans)
        c_kernels.attend(new, (self.keys, self.values), *self.step.tables[kind], core.scale, out)

    def _tables(self, core: Any, spans: Sequence[TokenSpan]) -> tuple[Tensor, Tensor]:
        """Return the tables ``tokens`` and ``starts`` of ``c_kernels.attend``."""
        tokens = self.step.table(core.first_key(self.step.positions))
        if isinstance(self.step, SingleTokens):
            return tokens, torch.arange(len(tokens) + 1)
        rows = [row for span in spans for row in range(span.row, span.row + span.count)]
        return tokens[rows], torch.tensor([0, *(span.count for span in spans)]).cumsum(0)

    def repeats_kernels(self, core: Any) -> bool:
        """Return whether all steps of one token per text call the same kernels."""
        return self.attends_at_once(core) or self._compiles(core)

    def _compiles(self, core: Any) -> bool:
        """Return whether the compiled kernel attends to the keys of single tokens."""
        return (
            self.keys.shape == self.values.shape
            and _is_softmax(core)
            and c_kernels.is_supported(self.keys)
        )

    def attends_at_once(self, core: Any) -> bool:
        """Return whether one kernel attends to the keys of all texts, if no token sees later ones."""
        return self.keys.shape == self.values.shape and core.takes_packed_rows(
            self.keys, _window_of_core(core)
        )


class WindowCache(AttentionCache):
    """Keys and values of the last ``length`` tokens of each text, for layers with an attention window.

    A text has a ring of ``length`` places, and the token at position p is at place p modulo ``length``. A single query
    reads the ring in the order of places, not of positions; attention does not depend on the order.
    """

    def __init__(
        self,
        requests: int,
        length: int,
        groups: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(requests * length, groups, widths, dtype, device)
        self._length = length

    def copy(self, source: int, target: int, count: int) -> None:
        """Do nothing: a ring stays in its slot when the keys of other layers move."""

    def _attend_spans(
        self, core: Any, new: _New, masks: Sequence[Tensor | None], out: Tensor
    ) -> None:
        """Store and attend span by span, because a step may have several chunks of a text."""
        spans = self.step.spans
        compiles = self._compiles(core)
        if (
            compiles
            and all(span.count == 1 for span in spans)
            and len({span.slot for span in spans}) == len(spans)
        ):
            self._attend_compiled(core, new, spans, out)
            return
        for span in spans:
            rows = slice(span.row, span.row + span.count)
            if compiles and span.count == 1:
                self._attend_compiled(core, new, [span], out)
            else:
                keys, values = self._seen(
                    span, core.first_key(span.start), new[1][rows], new[2][rows]
                )
                out[rows] = _attend_to_keys(core, new[0][rows], keys, values, span.ahead)

    def _tables(self, core: Any, spans: Sequence[TokenSpan]) -> tuple[Tensor, Tensor]:
        first = [span.slot * self._length for span in spans]
        rows = [
            (
                span.row,
                low + span.start % self._length,
                low,
                span.start + 1 - core.first_key(span.start),
            )
            for span, low in zip(spans, first, strict=True)
        ]
        return torch.tensor(rows), torch.arange(len(rows) + 1)

    def attends_at_once(self, core: Any) -> bool:
        return False

    def repeats_kernels(self, core: Any) -> bool:
        return False

    def _seen(self, span: TokenSpan, low: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return all from position ``low`` on."""
        if span.count == 1:
            self._store(span, key, value)
            first = span.slot * self._length
            visible = slice(first, first + span.start + 1 - low)
            return self.keys[visible], self.values[visible]
        old = self._places(span, low, span.start)
        keys_and_values = torch.cat((self.keys[old], key)), torch.cat((self.values[old], value))
        self._store(span, key, value)
        return keys_and_values

    def _places(self, span: TokenSpan, start: int, stop: int) -> Tensor:
        return (
            span.slot * self._length
            + torch.arange(start, stop, device=self.keys.device) % self._length
        )

    def _store(self, span: TokenSpan, key: Tensor, value: Tensor) -> None:
        count = min(span.count, self._length)
        places = self._places(span, span.start + span.count - count, span.start + span.count)
        self.keys[places], self.values[places] = key[-count:], value[-count:]


class LatentCache(AttentionCache):
    """Latents of multi-latent attention instead of keys and values: the ``cache`` of a layer and its core attention.

    A key of head i is W_i c and a value V_i c, both of the one latent c of a token. A score q (W_i c) equals
    (W_i^T q) c, and a weighted sum of values equals V_i times the weighted sum of latents. So all heads attend to the
    latents with projected queries, and only latents are stored, with the rotated part of keys: 576 numbers a token in
    DeepSeek-V3 instead of 40,960.
    """

    def __init__(
        self, tokens: int, attention: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        config = attention.config
        self.latent_width: int = config.kv_lora_rank
        width = self.latent_width + config.qk_pos_emb_head_dim
        self.keys = torch.empty(tokens, 1, width, dtype=dtype, device=device)
        self.values = self.keys[..., : self.latent_width]
        # a reference, so that new weights take effect at once: [heads, key and value features, latent]
        self._up: Any = attention.linear_kv_up_proj
        self._key_width: int = config.qk_head_dim
        self._heads: int = attention.num_attention_heads_per_partition

    def copy(self, source: int, target: int, count: int) -> None:
        self.keys[target : target + count] = self.keys[source : source + count].clone()

    def store(self, key: Tensor, value: Tensor) -> None:
        self.keys.index_copy_(0, self.step.places, key[: self.step.tokens])

    def project_queries(self, query: Tensor) -> Tensor:
        """Project queries without positions [rows, h, d] to [rows, h, latent]."""
        weight = self._weight()[:, : self._key_width]
        return torch.bmm(query.transpose(0, 1), weight).transpose(0, 1)

    def attend(self, core: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        latents = (
            super().attend(core, query, key, value).view(len(query), self._heads, self.latent_width)
        )
        weight = self._weight()[:, self._key_width :]
        return torch.bmm(latents.transpose(0, 1), weight.mT).transpose(0, 1).flatten(1).unsqueeze(1)

    def _weight(self) -> Tensor:
        return self._up.weight.unflatten(0, (self._heads, -1))


def _attend_to_keys(
    core: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Compute [count, h, dv] of a text's last tokens [count, h, d], which see the keys [s, g, d]."""
    count = len(query)
    if count == 1 and _sees_all(mask) and _is_softmax(core) and keys.size(2) == values.size(2):
        row = query.reshape(
            keys.size(1), 1, -1, keys.size(2)
        )  # groups are the batch: their heads are written together
        k, v = (tensor.transpose(0, 1).unsqueeze(1) for tensor in (keys, values))
        return F.scaled_dot_product_attention(row, k, v, scale=core.scale).reshape(
            1, -1, values.size(2)
        )
    mask, window = looking_ahead(mask, _window_of_core(core))
    span = QuerySpan(0, count, len(keys) - count, 0, len(keys))
    qkv = query.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1)
    return core._attend(qkv, mask, [span], window, core.softmax_offset)[:, 0]


def _sees_all(mask: Tensor | None) -> bool:
    """Return whether the last token of a text sees all keys: it has no boolean mask, and nothing comes later."""
    return mask is None or mask.dtype != torch.bool


def _is_softmax(core: Any) -> bool:
    """Return whether attention has neither capped scores nor sinks."""
    return core.softcap is None and core.softmax_offset is None


def _window_of_core(core: Any) -> AttentionWindow:
    return core._mask_window(core.attn_mask_type)
