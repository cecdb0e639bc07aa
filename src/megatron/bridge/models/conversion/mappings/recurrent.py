# SPDX-License-Identifier: Apache-2.0
"""Mappings of recurrent layers: Mamba-2 mixers, gated delta nets, and zero-centered norms.

These layers have projections to several kinds of features. Megatron shards each kind over the tensor-parallel ranks
and concatenates a rank's shards; Hugging Face concatenates the full kinds, or groups them by head.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, cast

from torch import Tensor, nn

from megatron.bridge.models.conversion.mappings.base import (
    ColumnParallelMapping,
    HFRange,
    HFWeights,
    ReplicatedMapping,
    ShardSpec,
)


class SegmentedMapping(ColumnParallelMapping):
    """One tensor with several row segments that are sharded separately; subclasses define their lengths."""

    def segments(self, config: Any) -> tuple[int, ...]:
        """Return the rows of each segment over all ranks, in order."""
        raise TypeError(f"{type(self).__name__} is abstract: {config} has no segments")

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        """Yield the first rank's part of every segment, then the second rank's, and so on."""
        assert isinstance(self.hf_param, str)
        lengths = self.segments(shard.config)
        starts = accumulate(lengths, initial=0)
        parts = [
            (start, length // shard.parts) for start, length in zip(starts, lengths, strict=False)
        ]
        for rank in range(shard.parts):
            for start, part in parts:
                yield HFRange(self.hf_param, start + rank * part, part)


class MambaInProjMapping(SegmentedMapping):
    """Input projection of a Mamba-2 mixer, weight [2 inner + 2 groups x state + heads, hidden]."""

    def segments(self, config: Any) -> tuple[int, ...]:
        """Return the rows of z, x, B, C and dt."""
        heads, inner, states = _mamba_sizes(config)
        return inner, inner, states, states, heads


class MambaConv1dMapping(SegmentedMapping):
    """Convolution of a Mamba-2 mixer (weight or bias) over inputs, B and C; [inner + 2 groups x state, ...]."""

    def segments(self, config: Any) -> tuple[int, ...]:
        """Return the rows of x, B and C."""
        _, inner, states = _mamba_sizes(config)
        return inner, states, states


def _mamba_sizes(config: Any) -> tuple[int, int, int]:
    """Return number of heads, their total width (default: twice the hidden size), and rows of B (or C)."""
    heads = config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim
    return heads, heads * config.mamba_head_dim, config.mamba_num_groups * config.mamba_state_dim


class GDNConv1dMapping(SegmentedMapping):
    """Convolution of a gated delta net over queries, keys and values; [2 key features + value features, ...]."""

    def segments(self, config: Any) -> tuple[int, ...]:
        """Return the rows of q, k and v."""
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


class ShortConvMapping(SegmentedMapping):
    """Input projection of a gated short convolution: two gates and the input; [3 hidden, hidden]."""

    def segments(self, config: Any) -> tuple[int, ...]:
        return (config.hidden_size,) * 3


class GDNLinearMapping(ColumnParallelMapping):
    """Input projection of a gated delta net, from two Hugging Face tensors that are grouped by key head.

    For each key head, Hugging Face stores query, key, values and output gates in ``qkvz``, and write strengths (beta)
    and decays (alpha) in ``ba``. A Megatron rank stores the queries of its heads, then keys, values, gates, betas and
    alphas.
    """

    def __init__(self, megatron_param: str, qkvz: str, ba: str) -> None:
        super().__init__(megatron_param, {"qkvz": qkvz, "ba": ba})

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        """Yield for the first rank each kind in order of heads, then for the second rank, and so on."""
        names = cast(dict[str, str], self.hf_param)
        config = shard.config
        ratio = config.linear_num_value_heads // config.linear_num_key_heads
        key = config.linear_key_head_dim
        values = ratio * config.linear_value_head_dim
        kinds = [
            ("qkvz", key),
            ("qkvz", key),
            ("qkvz", values),
            ("qkvz", values),
            ("ba", ratio),
            ("ba", ratio),
        ]
        rows = {"qkvz": 2 * (key + values), "ba": 2 * ratio}
        heads = config.linear_num_key_heads // shard.parts
        for rank in range(shard.parts):
            offsets = dict.fromkeys(rows, 0)
            for role, length in kinds:
                for head in range(rank * heads, (rank + 1) * heads):
                    yield HFRange(names[role], head * rows[role] + offsets[role], length)
                offsets[role] += length


class SplitGDNLinearMapping(ColumnParallelMapping):
    """The same from four Hugging Face tensors that are ordered by head; ``qkv`` is ordered by kind."""

    def __init__(self, megatron_param: str, qkv: str, z: str, b: str, a: str) -> None:
        super().__init__(megatron_param, {"qkv": qkv, "z": z, "b": b, "a": a})

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        """Yield each kind for the first rank, then for the second, and so on."""
        names = cast(dict[str, str], self.hf_param)
        config = shard.config
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        heads = config.linear_num_value_heads
        values = heads * config.linear_value_head_dim
        kinds = (("qkv", 0, keys), ("qkv", keys, keys), ("qkv", 2 * keys, values), ("z", 0, values))
        for rank in range(shard.parts):
            for role, start, length in (*kinds, ("b", 0, heads), ("a", 0, heads)):
                part = length // shard.parts
                yield HFRange(names[role], start + rank * part, part)


class RMSNorm2ZeroCenteredRMSNormMapping(ReplicatedMapping):
    """A norm weight that Megatron stores minus one (``zero_centered_gamma``).

    The subtraction uses float32, but half precision rounds the result, so the last bits of a weight may change: prefer
    a Megatron norm of the same kind as Hugging Face's.
    """

    keeps_shapes = True

    def hf_to_megatron(self, hf_weights: HFWeights, megatron_module: nn.Module) -> Tensor:
        (weight,) = self._by_name(hf_weights).values()
        return (weight.float() - 1.0).to(weight.dtype)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """Return the weight itself, or nothing on stages that do not own it."""
        if megatron_weights is None:
            return {}
        return {self.hf_names[0]: (megatron_weights.float() + 1.0).to(megatron_weights.dtype)}
