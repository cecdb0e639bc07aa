# SPDX-License-Identifier: Apache-2.0
"""Gains of norms that belong to single attention heads."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from megatron.bridge.models.conversion.mappings.base import (
    ColumnParallelMapping,
    HFRange,
    HFWeights,
    ShardSpec,
)


class HeadGainsMapping(ColumnParallelMapping):
    """Gains [heads of this rank, width], of which Hugging Face has one vector [width] for each head.

    ``hf_param`` has the name of each head's vector, by the head's number. Heads that pad the last ranks have none.
    """

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        for name in self._head_names():
            yield HFRange(name, 0, 1)

    def hf_slice_shapes(self, shard: ShardSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape of each head's vector."""
        return dict.fromkeys(self._head_names(), (shard.shape[-1],))

    def hf_to_megatron(self, hf_weights: HFWeights, megatron_module: nn.Module) -> Tensor:
        """Stack the vectors of the heads of this rank, with zeros for padding."""
        shard = self.shard_of(megatron_module)
        vectors = list(self._by_name(hf_weights).values())
        local_heads = shard.shape[0]
        first = shard.rank * local_heads
        local = vectors[0].new_zeros(shard.shape)
        for index, vector in enumerate(vectors[first : first + local_heads]):
            local[index] = vector
        return local

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """Gather the gains of all heads and return one vector for each; nothing on other stages."""
        if megatron_weights is None or megatron_module is None:
            return {}
        shard = self.shard_of(megatron_module, megatron_weights)
        shards = [megatron_weights]
        if shard.parts > 1:
            shards = self.gather_from_tp_ranks(megatron_weights)
        names = self._head_names()
        vectors = torch.cat(shards)[: len(names)]
        return {name: vector.clone() for name, vector in zip(names, vectors, strict=True)}

    def _head_names(self) -> list[str]:
        return list(cast(dict[str, str], self.hf_param).values())
