# SPDX-License-Identifier: Apache-2.0
"""Mappings of parameters that Megatron fuses: queries, keys and values, gate and up projections."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.bridge.models.conversion.mappings.base import (
    AttentionHeads,
    AutoMapping,
    ColumnParallelMapping,
    HFNames,
    HFRange,
    HFWeights,
    ShardSpec,
)
from megatron.bridge.utils.errors import UserError


class QKVMapping(ColumnParallelMapping):
    """Separate query, key and value projections, interleaved by key-value group in Megatron.

    For each group, Megatron stores the rows of its queries, its key and its value; [heads per group + 2 rows of
    ``kv_channels``] x groups. Biases have the same order. A layer may lack the value, or key and value.
    """

    def __init__(
        self, megatron_param: str, q: str, k: str | None = None, v: str | None = None
    ) -> None:
        names = {"q": q, "k": k, "v": v}
        super().__init__(
            megatron_param, {role: name for role, name in names.items() if name is not None}
        )

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        names = cast(dict[str, str], self.hf_param)
        roles = "".join(names)
        for role, start, length in _group_rows(
            AttentionHeads.of(shard.config), roles, dict.fromkeys(roles, 0)
        ):
            yield HFRange(names[role], start, length)


class GatedQKVMapping(QKVMapping):
    """Like ``QKVMapping``, with a query projection that also computes gates for the output of attention.

    Hugging Face stores each head's query before its gate. Megatron stores for each group the queries of its heads,
    their gates, its key, and its value.
    """

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        names = cast(dict[str, str], self.hf_param)
        heads = AttentionHeads.of(shard.config)
        heads_per_group = heads.queries // heads.groups
        for group in range(heads.groups):
            for gate in range(2):
                for head in range(group * heads_per_group, (group + 1) * heads_per_group):
                    yield HFRange(names["q"], (2 * head + gate) * heads.width, heads.width)
            for role in "kv":
                yield HFRange(names[role], group * heads.width, heads.width)


class SeparatelyGatedQKVMapping(ColumnParallelMapping):
    """Like ``GatedQKVMapping``, with a separate projection for the gates of attention's output."""

    def __init__(self, megatron_param: str, q: str, gate: str, k: str, v: str) -> None:
        super().__init__(megatron_param, {"q": q, "gate": gate, "k": k, "v": v})

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        """Yield for each group the queries of its heads, their gates, its key, and its value."""
        names = cast(dict[str, str], self.hf_param)
        heads = AttentionHeads.of(shard.config)
        query_rows = heads.queries // heads.groups * heads.width
        for group in range(heads.groups):
            for role, length in (
                ("q", query_rows),
                ("gate", query_rows),
                ("k", heads.width),
                ("v", heads.width),
            ):
                yield HFRange(names[role], group * length, length)


class ConcatenatedQKVMapping(ColumnParallelMapping):
    """One Hugging Face tensor with all queries, then all keys, then all values."""

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        assert isinstance(self.hf_param, str)
        heads = AttentionHeads.of(shard.config)
        keys = heads.queries * heads.width
        starts = {"q": 0, "k": keys, "v": keys + heads.groups * heads.width}
        for _, start, length in _group_rows(heads, "qkv", starts):
            yield HFRange(self.hf_param, start, length)


class GroupedQKVMapping(ColumnParallelMapping):
    """One Hugging Face tensor in Megatron's order: for each group its queries, its key, its value."""

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        assert isinstance(self.hf_param, str)
        heads = AttentionHeads.of(shard.config)
        yield HFRange(self.hf_param, 0, (heads.queries + 2 * heads.groups) * heads.width)


class KVMapping(ColumnParallelMapping):
    """Separate key and value projections, interleaved by group in Megatron (cross attention)."""

    def __init__(self, megatron_param: str, k: str, v: str) -> None:
        super().__init__(megatron_param, {"k": k, "v": v})

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        names = cast(dict[str, str], self.hf_param)
        for role, start, length in _group_rows(
            AttentionHeads.of(shard.config), "kv", {"k": 0, "v": 0}
        ):
            yield HFRange(names[role], start, length)


class GatedMLPMapping(ColumnParallelMapping):
    """Separate gate and up projections; each Megatron shard stores its rows of gate before its rows of up."""

    def __init__(self, megatron_param: str, gate: str, up: str) -> None:
        super().__init__(megatron_param, {"gate": gate, "up": up})

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        """Yield gate and up of the first rank, then of the second, and so on."""
        names = cast(dict[str, str], self.hf_param)
        half = shard.local // 2
        for rank in range(shard.parts):
            yield HFRange(names["gate"], rank * half, half)
            yield HFRange(names["up"], rank * half, half)


class ConcatenatedGatedMLPMapping(ColumnParallelMapping):
    """One Hugging Face tensor with the rows of gate before the rows of up."""

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        assert isinstance(self.hf_param, str)
        half = shard.local // 2
        for rank in range(shard.parts):
            yield HFRange(self.hf_param, rank * half, half)
            yield HFRange(self.hf_param, (shard.parts + rank) * half, half)


class InterleavedGatedMLPMapping(ColumnParallelMapping):
    """One Hugging Face tensor with alternating rows of gate and up."""

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        assert isinstance(self.hf_param, str)
        half = shard.local // 2
        for rank in range(shard.parts):
            yield HFRange(self.hf_param, 2 * rank * half, half, step=2)
            yield HFRange(self.hf_param, 2 * rank * half + 1, half, step=2)


class FusedExpertMapping(AutoMapping):
    """One projection of all experts, stacked along the first dimension of one Hugging Face tensor.

    Args:
        megatron_param: Name of one expert's parameter; the last wildcard is the index of the expert.
        hf_param: Name of the tensor of all experts.
        permute_dims: Only None; ``transpose_on_export`` says how matrices are stored.
        transpose_on_export: Whether Hugging Face stores each expert's matrix as [in, out].
    """

    def __init__(
        self,
        megatron_param: str,
        hf_param: HFNames,
        permute_dims: tuple[int, ...] | None = None,
        transpose_on_export: bool = False,
    ) -> None:
        _refuse_permutation(megatron_param, permute_dims)
        super().__init__(megatron_param, hf_param)
        self.is_stacked = True
        self.transposed = transpose_on_export


class FusedGatedExpertMapping(ConcatenatedGatedMLPMapping):
    """Gate and up projections of all experts in one Hugging Face tensor; see ``FusedExpertMapping``."""

    def __init__(
        self,
        megatron_param: str,
        hf_param: HFNames,
        permute_dims: tuple[int, ...] | None = None,
        transpose_on_export: bool = False,
    ) -> None:
        _refuse_permutation(megatron_param, permute_dims)
        super().__init__(megatron_param, hf_param)
        self.is_stacked = True
        self.transposed = transpose_on_export


def _refuse_permutation(megatron_param: str, permute_dims: tuple[int, ...] | None) -> None:
    if permute_dims is not None:
        raise UserError(
            f"permute_dims={permute_dims} of {megatron_param} is not supported: for experts stored as "
            "[in, out] use transpose_on_export=True"
        )


class SwappedInputMapping(AutoMapping):
    """A linear layer for which Hugging Face swaps the two halves of the input."""

    keeps_shapes = True

    def hf_to_megatron(self, hf_weights: HFWeights, megatron_module: nn.Module) -> Tensor:
        return super().hf_to_megatron(_swap_halves(self._by_name(hf_weights)), megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        return _swap_halves(super().megatron_to_hf(megatron_weights, megatron_module))


def _swap_halves(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.roll(weight.shape[1] // 2, dims=1) for name, weight in weights.items()}


def _group_rows(
    heads: AttentionHeads, roles: str, starts: Mapping[str, int]
) -> Iterator[tuple[str, int, int]]:
    """Yield (role, row, rows) in Megatron's order: group by group, in the order of ``roles`` within a group."""
    rows = {
        role: heads.width * (heads.queries // heads.groups if role == "q" else 1) for role in roles
    }
    for group in range(heads.groups):
        for role in roles:
            yield role, starts[role] + group * rows[role], rows[role]


def _merge_roles(config: Any, roles: str, tensors: Mapping[str, Tensor]) -> Tensor:
    rows = _group_rows(AttentionHeads.of(config), roles, dict.fromkeys(roles, 0))
    return torch.cat([tensors[role].narrow(0, start, length) for role, start, length in rows])


def _split_roles(config: Any, roles: str, fused: Tensor) -> tuple[Tensor, ...]:
    parts: dict[str, list[Tensor]] = {role: [] for role in roles}
    position = 0
    for role, _, length in _group_rows(AttentionHeads.of(config), roles, dict.fromkeys(roles, 0)):
        parts[role].append(fused.narrow(0, position, length))
        position += length
    return tuple(torch.cat(parts[role]) for role in roles)


def merge_qkv_weights(config: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Interleave queries, keys and values by group: [(heads + 2 groups) * kv_channels, hidden]; also for biases."""
    return _merge_roles(config, "qkv", {"q": q, "k": k, "v": v})


def split_qkv_weights(config: Any, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Undo ``merge_qkv_weights``."""
    q, k, v = _split_roles(config, "qkv", qkv)
    return q, k, v


merge_qkv_biases, split_qkv_biases = merge_qkv_weights, split_qkv_weights


def merge_kv_weights(config: Any, k: Tensor, v: Tensor) -> Tensor:
    """Interleave key and value projections by group: [2 groups * kv_channels, hidden]."""
    return _merge_roles(config, "kv", {"k": k, "v": v})


def split_kv_weights(config: Any, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Undo ``merge_kv_weights``."""
    k, v = _split_roles(config, "kv", kv)
    return k, v
