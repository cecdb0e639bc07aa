# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention that caches latents instead of keys and values.

A key of head i is W_i c and a value V_i c, both of the one latent c of a token. A score q (W_i c) equals
(W_i^T q) c, and a weighted sum of values equals V_i times the weighted sum of latents. So all heads attend to the
latents with projected queries, and only latents are stored: 576 numbers a token in DeepSeek-V3 instead of 40,960.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.bridge.backends.decoding.attention_cache import AttentionCache


class LatentCache(AttentionCache):
    """Latents of ``tokens`` tokens with the rotated part of keys: the ``cache`` of a layer and its core attention."""

    def __init__(self, tokens: int, attention: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = attention.config
        self.latent_width: int = config.kv_lora_rank
        width = self.latent_width + config.qk_pos_emb_head_dim
        self.keys = torch.empty(tokens, 1, width, dtype=dtype, device=device)
        self.values = self.keys[..., : self.latent_width]
        # a reference, so that new weights count at once: [heads, key and value features, latent]
        self._up: Any = attention.linear_kv_up_proj
        self._key_width: int = config.qk_head_dim
        self._heads: int = attention.num_attention_heads_per_partition

    def copy(self, source: int, target: int, count: int) -> None:
        self.keys[target : target + count] = self.keys[source : source + count].clone()

    def store(self, key: Tensor, value: Tensor) -> None:
        self.keys.index_copy_(0, self.step.places, key[: self.step.tokens])

    def project_queries(self, query: Tensor) -> Tensor:
        """[rows, h, latent] of queries without positions [rows, h, d]."""
        weight = self._weight()[:, : self._key_width]
        return torch.bmm(query.transpose(0, 1), weight).transpose(0, 1)

    def read(self, core: Any, query: Tensor) -> Tensor:
        latents = super().read(core, query).view(query.size(0), self._heads, self.latent_width)
        weight = self._weight()[:, self._key_width :]
        return torch.bmm(latents.transpose(0, 1), weight.mT).transpose(0, 1).flatten(1).unsqueeze(1)

    def _weight(self) -> Tensor:
        return self._up.weight.unflatten(0, (self._heads, -1))
