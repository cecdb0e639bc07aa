# SPDX-License-Identifier: Apache-2.0
"""Keys and values of all requests of one attention layer, and attention of new tokens to them.

A request owns consecutive rows of the cache (its extent), so its keys are a view and nothing is gathered. Attention
runs per request: the result does not depend on the other requests of the step.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.bridge.backends.attention import flash_attention
from megatron.bridge.backends.attention.block_mask import AttentionWindow, QuerySpan, looking_ahead
from megatron.bridge.backends.decoding.step import Span, Step


class AttentionCache:
    """Keys and values, attached to a ``TorchAttention`` as its ``cache``.

    Args:
        tokens: capacity in tokens for all requests.
        groups: key heads of this rank.
        widths: width of a key and of a value.
    """

    step: Step

    def __init__(
        self, tokens: int, groups: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
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
        self.store(key[:, 0], value[:, 0])
        return self.read(core, query)

    def store(self, key: Tensor, value: Tensor) -> None:
        """Store keys [rows, g, d] and values [rows, g, dv] at the places of the step."""
        tokens = self.step.tokens
        self.keys.index_copy_(0, self.step.places, key[:tokens])
        self.values.index_copy_(0, self.step.places, value[:tokens])

    def read(self, core: Any, query: Tensor) -> Tensor:
        """Compute attention [rows, 1, h * dv] of queries [rows, 1, h, d] whose keys are stored."""
        tokens, spans = self.step.tokens, self.step.spans
        padding = query.new_zeros(query.size(0) - tokens, query.size(2), self.values.size(2))
        masks = core.masks or [span.ahead for span in spans]
        plain = all(mask is None for mask in masks)
        if plain and self.attends_at_once(core):
            form = self.step.extents, _window(core), core.scale, core.softmax_offset
            found = [flash_attention.attend_extents(query[:tokens, 0], self.keys, self.values, *form)]
        elif plain and self.keys.shape == self.values.shape and _is_softmax(core) and tokens == len(spans):
            found = self._read_single_tokens(core, query[:tokens])
        else:
            found = [self._read(core, query, span, mask) for span, mask in zip(spans, masks, strict=True)]
        return torch.cat((*found, padding)).flatten(1).unsqueeze(1)

    def _read_single_tokens(self, core: Any, query: Tensor) -> list[Tensor]:
        """Compute attention [1, h, d] of one token of a text, with fewer views than ``_attend``."""
        groups, width = self.keys.shape[1:]
        rows = query.reshape(len(query), groups, 1, -1, width).unbind()
        strides, found = (width, width, groups * width, 1), []
        for span, row in zip(self.step.spans, rows, strict=True):
            low = core.first_key(span.start)
            size, start = (groups, 1, span.start + 1 - low, width), (span.extent + low) * groups * width
            k, v = self.keys.as_strided(size, strides, start), self.values.as_strided(size, strides, start)
            found.append(_attend_one(row, k, v, core.scale))
        return found

    def _read(self, core: Any, query: Tensor, span: Span, mask: Tensor | None) -> Tensor:
        """Compute attention [count, h, dv] of one text."""
        seen = slice(span.extent + core.first_key(span.start), span.extent + span.start + span.count)
        return _attend(core, query[span.row : span.row + span.count], self.keys[seen], self.values[seen], mask)

    def attends_at_once(self, core: Any) -> bool:
        """Return whether one kernel attends to the keys of all texts, if no token sees later ones."""
        return self.keys.shape == self.values.shape and core.takes_packed_rows(self.keys, _window(core))


class WindowCache(AttentionCache):
    """Keys and values of the last ``length`` tokens of each text, for layers with an attention window.

    A text has a ring of ``length`` places, and the token at position p is at place p modulo ``length``. A single query
    reads the ring in the order of places, not of positions; attention does not depend on the order.
    """

    def __init__(
        self, requests: int, length: int, groups: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(requests * length, groups, widths, dtype, device)
        self._length = length

    def copy(self, source: int, target: int, count: int) -> None:
        """Do nothing: a ring stays in its slot when the keys of other layers move."""

    def attend(self, core: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store and attend like the base class, but span by span, because a step may have several chunks of a text."""
        out = query.new_zeros(query.size(0), query.size(2), self.values.size(2))
        for span in self.step.spans:
            rows = slice(span.row, span.row + span.count)
            keys, values = self._seen(span, core.first_key(span.start), key[rows, 0], value[rows, 0])
            out[rows] = _attend(core, query[rows], keys, values, span.ahead)
        return out.flatten(1).unsqueeze(1)

    def _seen(self, span: Span, low: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return all from position ``low`` on."""
        if span.count == 1:
            self._store(span, key, value)
            first = span.slot * self._length
            seen = slice(first, first + span.start + 1 - low)
            return self.keys[seen], self.values[seen]
        old = self._places(span, low, span.start)
        whole = torch.cat((self.keys[old], key)), torch.cat((self.values[old], value))
        self._store(span, key, value)
        return whole

    def _places(self, span: Span, start: int, stop: int) -> Tensor:
        return span.slot * self._length + torch.arange(start, stop, device=self.keys.device) % self._length

    def _store(self, span: Span, key: Tensor, value: Tensor) -> None:
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

    def __init__(self, tokens: int, attention: Any, dtype: torch.dtype, device: torch.device) -> None:
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

    def read(self, core: Any, query: Tensor) -> Tensor:
        latents = super().read(core, query).view(query.size(0), self._heads, self.latent_width)
        weight = self._weight()[:, self._key_width :]
        return torch.bmm(latents.transpose(0, 1), weight.mT).transpose(0, 1).flatten(1).unsqueeze(1)

    def _weight(self) -> Tensor:
        return self._up.weight.unflatten(0, (self._heads, -1))


def _attend(core: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Compute [count, h, dv] of a text's last tokens [count, 1, h, d], which see the keys [s, g, d]."""
    count = len(query)
    alone = count == 1 and (mask is None or mask.dtype != torch.bool)
    if alone and _is_softmax(core) and keys.size(2) == values.size(2):
        row = query.reshape(keys.size(1), 1, -1, keys.size(2))
        k, v = (tensor.transpose(0, 1).unsqueeze(1) for tensor in (keys, values))
        return _attend_one(row, k, v, core.scale)
    return _attend_many(core, query, keys, values, mask, QuerySpan(0, count, len(keys) - count, 0, len(keys)))


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute [1, h, dv] of one query [g, 1, h / g, d], which sees all keys [g, 1, s, d].

    Groups are the batch, because the kernel then writes their heads one after the other.
    """
    return F.scaled_dot_product_attention(query, keys, values, scale=scale).reshape(1, -1, values.size(-1))


def _is_softmax(core: Any) -> bool:
    """Return whether attention has neither capped scores nor sinks."""
    return core.softcap is None and core.softmax_offset is None


def _window(core: Any) -> AttentionWindow:
    return core._mask_window(core.attn_mask_type)


def _attend_many(
    core: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, span: QuerySpan
) -> Tensor:
    """Compute [count, h, dv] of the last tokens of a text with the code for training."""
    mask, window = looking_ahead(mask, _window(core))
    sinks = core.softmax_offset
    return core._attend((query, keys.unsqueeze(1), values.unsqueeze(1)), mask, [span], window, sinks)[:, 0]
