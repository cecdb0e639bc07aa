# SPDX-License-Identifier: Apache-2.0
"""Mappings between a Megatron parameter and its Hugging Face tensors.

A mapping lists the *blocks* of Hugging Face tensors in the order in which Megatron concatenates them over all
tensor-parallel ranks. Splitting this list at rank boundaries gives *pieces*, ranges that both sides share. Loading and
export copy the same pieces in opposite directions. Only ``megatron_to_hf`` communicates: it gets the shards of other
ranks from ``exchange``.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn

from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.mappings.patterns import substitute
from megatron.bridge.utils.errors import UserError

ParallelKind = Literal["column", "row", "replicated"]
HFNames = str | dict[str, str]
HFPart = tuple[
    str, int | None
]  # a Hugging Face tensor, or one expert of a tensor that holds all experts
HFWeights = Tensor | Mapping[str, Tensor]

# dimensions that Megatron may pad to a multiple of the ranks; Hugging Face stores only the real rows or columns
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")
_HEADS = {
    ("self_attention.linear_proj.weight", "row"): "queries",
    (
        "self_attention.q_layernorm.weight",
        "column",
    ): "queries",  # a norm over all heads; a per-head norm is not sharded
    ("self_attention.k_layernorm.weight", "column"): "groups",
}


@dataclass(frozen=True)
class HFRange:
    """``length`` rows (or columns) of a Hugging Face tensor, every ``step``-th beginning at ``start``."""

    hf: str
    start: int
    length: int
    step: int = 1

    @property
    def stop(self) -> int:
        """The index after the last row."""
        return self.start + (self.length - 1) * self.step + 1


@dataclass(frozen=True)
class CopyRange:
    """``length`` indices along ``dim`` with equal values: of ``hf`` from ``source``, of the shard from ``target``."""

    hf: str  # the Hugging Face tensor
    dim: int  # the dimension in Megatron's order
    source: int  # first index in the Hugging Face tensor
    target: int  # first index in the shard
    length: int
    step: int = 1  # distance between indices of the Hugging Face tensor
    expert: int | None = (
        None  # index of an expert in a tensor that holds all experts; None for other tensors
    )
    transposed: bool = False  # whether the Hugging Face matrix is transposed

    @property
    def hf_index(self) -> tuple[int | slice, ...]:
        """The index of this range in the Hugging Face tensor."""
        return self._slice_index if self.expert is None else (self.expert, *self._slice_index)

    @property
    def _slice_index(self) -> tuple[slice, ...]:
        dim = 1 - self.dim if self.transposed else self.dim
        stop = self.source + (self.length - 1) * self.step + 1
        return (*[slice(None)] * dim, slice(self.source, stop, self.step))

    def of_hf(self, tensor: Tensor) -> Tensor:
        """Return the view of a full Hugging Face tensor."""
        return tensor[self.hf_index] if tensor.ndim else tensor

    def of_slice(self, tensor: Tensor) -> Tensor:
        """Return the view of the Hugging Face tensor, or of one expert's part if it holds all experts."""
        return tensor[self._slice_index] if tensor.ndim else tensor

    def of_shard(self, shard: Tensor) -> Tensor:
        """Return the view of a Megatron shard, transposed like the Hugging Face tensor."""
        view = shard.narrow(self.dim, self.target, self.length) if shard.ndim else shard
        return view.mT if self.transposed else view

    @property
    def is_plain(self) -> bool:
        """Whether the Hugging Face side is a contiguous range of a tensor that is not transposed."""
        return self.step == 1 and self.expert is None and not self.transposed


@dataclass(frozen=True)
class Unjoined:
    """A Hugging Face tensor whose values are still in shards."""

    shape: tuple[int, ...]
    like: Tensor  # a tensor with its dtype and device
    pieces: list[tuple[CopyRange, Tensor]] = field(default_factory=list[tuple[CopyRange, Tensor]])
    """Ranges, and views of the shards with their values."""

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def write(self, target: Tensor) -> None:
        """Join the shards into ``target``, which may have another dtype."""
        for piece, numbers in self.pieces:
            piece.of_slice(target).copy_(numbers)

    def contiguous(self) -> Tensor:
        """Return the tensor: a view if one shard contains all of it, else a copy."""
        piece, numbers = self.pieces[0]
        is_view = len(self.pieces) == 1 and piece.is_plain and numbers.shape == self.shape
        return numbers if is_view and numbers.is_contiguous() else self.whole()

    def whole(self) -> Tensor:
        target = torch.empty(self.shape, dtype=self.dtype, device=self.like.device)
        self.write(target)
        return target


@dataclass(frozen=True)
class ShardSpec:
    """The part of a parameter on one rank."""

    shape: tuple[int, ...]  # shape on this rank
    kind: ParallelKind  # how the parameter is sharded: along rows, along columns, or not at all
    rank: int  # this rank in the tensor-parallel group
    size: int  # size of the tensor-parallel group
    config: Any  # the ``TransformerConfig`` of the model, for mappings that need head counts

    @property
    def dim(self) -> int:
        return 1 if self.kind == "row" and len(self.shape) > 1 else 0

    @property
    def parts(self) -> int:
        """Number of shards."""
        return (
            1
            if self.kind == "replicated" or (self.kind == "row" and len(self.shape) < 2)
            else self.size
        )

    @property
    def part(self) -> int:
        return self.rank if self.parts > 1 else 0

    @property
    def local(self) -> int:
        """Size of ``dim`` on this rank."""
        return self.shape[self.dim] if self.shape else 1


class _GroupNow:
    """Descriptor that looks up a group on each access; an instance may replace it."""

    def __init__(self, find: Callable[[], exchange.Group]) -> None:
        self._find = find

    def __get__(self, mapping: Any, owner: type | None = None) -> Any:
        return self._find()


def _rank_and_size(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def _rank_properties(group: str) -> tuple[Any, Any]:
    """Return properties for this rank in the group of that name, and for the size of the group."""
    return (
        property(lambda mapping: _rank_and_size(getattr(mapping, group))[0]),
        property(lambda mapping: _rank_and_size(getattr(mapping, group))[1]),
    )


class MegatronParamMapping:
    """A Megatron parameter and the Hugging Face tensors with its values.

    Subclasses define the layout in ``blocks``. A mapping that computes values overrides ``hf_to_megatron`` and
    ``megatron_to_hf``, which get full tensors. If the tensors' shapes differ from ``blocks``, it also overrides
    ``hf_slice_shapes``, which an export without a source calls.

    A program may replace the groups and ``gather_from_tp_ranks`` on a copy of a mapping: ``megatron_to_hf`` of the copy
    then uses the replacements and does no other communication.

    Args:
        megatron_param: Megatron name; ``*`` stands for one path segment, ``**`` for any number.
        hf_param: Hugging Face name, or names by role, with the same wildcards in the same order.
    """

    kind: ClassVar[ParallelKind | None] = (
        None  # how the parameter is sharded; None uses the module's sharding
    )
    is_stacked = False  # whether each Hugging Face tensor holds all experts, and this parameter is one of them
    transposed = False  # whether the Hugging Face matrices are [in, out]
    keeps_shapes: ClassVar[bool] = False
    """Whether a mapping that computes keeps the shapes of ``blocks``, so that loading can check them."""
    expert: int | None = (
        None  # expert index of this parameter in stacked tensors; None while it is a wildcard
    )

    def __init__(self, megatron_param: str, hf_param: HFNames) -> None:
        self.megatron_param = megatron_param
        self.hf_param = hf_param

    @property
    def hf_names(self) -> list[str]:
        return [self.hf_param] if isinstance(self.hf_param, str) else list(self.hf_param.values())

    @property
    def parts(self) -> list[HFPart]:
        return [(name, self.expert) for name in self.hf_names]

    def stacked(self, transposed: bool = False) -> Self:
        """Return this mapping for Hugging Face tensors that stack all experts along their first dimension.

        The last wildcard of ``megatron_param`` is the expert's index.

        Args:
            transposed: each expert's matrix is stored as [in, out].
        """
        mapping = copy.copy(self)
        mapping.is_stacked = True
        mapping.transposed = transposed
        return mapping

    def turned(self) -> Self:
        """Return this mapping for Hugging Face matrices that are stored as [in, out], such as those of ``Conv1D``."""
        mapping = copy.copy(self)
        mapping.transposed = True
        return mapping

    def resolve(self, captures: Iterable[str]) -> Self:
        """Return the mapping of a concrete parameter, in which ``captures`` replace the wildcards in order."""
        values = tuple(captures)
        mapping = self.renamed(
            lambda name: substitute(name, values), lambda name: substitute(name, values)
        )
        if self.is_stacked:
            mapping.expert = int(values[-1])
        return mapping

    def renamed(self, megatron: Callable[[str], str], hf: Callable[[str], str]) -> Self:
        """Return this mapping with its names replaced by the results of the two functions."""
        name = megatron(self.megatron_param)
        if isinstance(self.hf_param, str):
            mapping = self._rebuild(name, hf(self.hf_param))
        else:
            mapping = self._rebuild(
                name, {role: hf(hf_name) for role, hf_name in self.hf_param.items()}
            )
        mapping.is_stacked = self.is_stacked
        mapping.transposed = self.transposed
        mapping.expert = self.expert
        return mapping

    def _rebuild(self, megatron_param: str, hf_param: HFNames) -> Self:
        create = cast(Any, type(self))
        if _takes_roles(create) and not isinstance(hf_param, str):
            return create(megatron_param, **hf_param)
        return create(megatron_param, hf_param)

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        """Yield the ranges of the full parameter along ``shard.dim``, rank after rank."""
        if not isinstance(self.hf_param, str):
            raise UserError(
                f"{type(self).__name__} of {self.megatron_param} has several tensors but no layout: define "
                "blocks(shard), or hf_slice_shapes(shard) if it computes them"
            )
        full_length = shard.local * shard.parts
        if self.megatron_param.endswith(_VOCABULARY):
            full_length = min(full_length, getattr(shard.config, "vocab_size", None) or full_length)
        for (name, kind), heads in _HEADS.items():
            if self.megatron_param.endswith(name) and shard.kind == kind:
                by_head = kind == "column" and len(shard.shape) > 1  # a row for each head
                full_length = min(full_length, AttentionHeads.of(shard.config).wide(heads, by_head))
        yield HFRange(self.hf_param, 0, full_length)

    def copy_ranges(self, shard: ShardSpec) -> list[CopyRange]:
        """Return the ranges that ``shard`` shares with the Hugging Face tensors."""
        first = shard.part * shard.local
        last = (shard.part + 1) * shard.local
        copy_ranges: list[CopyRange] = []
        position = 0
        for block in self.blocks(shard):
            start = max(first, position)
            stop = min(last, position + block.length)
            if start < stop:
                copy_ranges.append(
                    CopyRange(
                        hf=block.hf,
                        dim=shard.dim,
                        source=block.start + (start - position) * block.step,
                        target=start - first,
                        length=stop - start,
                        step=block.step,
                        expert=self.expert,
                        transposed=self.transposed,
                    )
                )
            position += block.length
        return copy_ranges

    def hf_shapes(self, shard: ShardSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the full Hugging Face tensors."""
        shapes = self.hf_slice_shapes(shard)
        if not self.is_stacked:
            return shapes
        return {hf: (shard.config.num_moe_experts, *shape) for hf, shape in shapes.items()}

    def hf_slice_shapes(self, shard: ShardSpec) -> dict[str, tuple[int, ...]]:
        """Return the same shapes; if a tensor holds all experts, only the shape of one expert's part."""
        extent: dict[str, int] = {}
        for block in self.blocks(shard):
            extent[block.hf] = max(extent.get(block.hf, 0), block.stop)
        if not shard.shape:
            return dict.fromkeys(extent, ())
        before = shard.shape[: shard.dim]
        after = shard.shape[shard.dim + 1 :]
        turn = -1 if self.transposed else 1
        return {hf: (*before, length, *after)[::turn] for hf, length in extent.items()}

    @property
    def copies(self) -> bool:
        """Whether ``blocks`` fully describes the mapping, so that ranges can be copied without calling its methods."""
        base = MegatronParamMapping
        mapping_class = type(self)
        return (
            mapping_class.hf_to_megatron is base.hf_to_megatron
            and mapping_class.megatron_to_hf is base.megatron_to_hf
        )

    def shard_of(self, module: nn.Module, parameter: Tensor | None = None) -> ShardSpec:
        """Describe this rank's part of the parameter that ``module`` owns."""
        name = self.megatron_param.rsplit(".", 1)[-1]
        parameter = getattr(module, name) if parameter is None else parameter
        rank, size = exchange.rank_and_size(exchange.shard_group(self.megatron_param))
        # the module's own parameter has the sharding attributes; ``parameter`` may hold other values for it
        kind = self.kind or parallel_kind(module, cast(Tensor, getattr(module, name, parameter)))
        return ShardSpec(
            tuple(cast(Tensor, parameter).shape), kind, rank, size, getattr(module, "config", None)
        )

    def hf_to_megatron(self, hf_weights: HFWeights, megatron_module: nn.Module) -> Tensor:
        """Return this rank's shard of full Hugging Face tensors (by role if there are several)."""
        full_tensors = self._by_name(hf_weights)
        shard = self.shard_of(megatron_module)
        like = next(iter(full_tensors.values()))
        local = torch.zeros(shard.shape, dtype=like.dtype, device=like.device)
        for piece in self.copy_ranges(shard):
            piece.of_shard(local).copy_(piece.of_hf(full_tensors[piece.hf]))
        return local

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """Return full Hugging Face tensors on all ranks of the stage that owns the parameter, and nothing elsewhere.

        If a tensor holds all experts, return only this expert's part.
        """
        if megatron_weights is None or megatron_module is None:
            return {}
        shard = self.shard_of(megatron_module, megatron_weights)
        weights = (
            self.gather_from_tp_ranks(megatron_weights) if shard.parts > 1 else [megatron_weights]
        )
        return self.join(shard, weights)

    def join(self, shard: ShardSpec, weights: list[Tensor]) -> dict[str, Tensor]:
        """Join shards in rank order into full Hugging Face tensors (an expert's part if they are stacked)."""
        return {hf: unjoined.whole() for hf, unjoined in self.unjoined(shard, weights).items()}

    def unjoined(self, shard: ShardSpec, weights: list[Tensor]) -> dict[str, "Unjoined"]:
        """Return the same tensors without joining them, so that the caller can join them at their destination."""
        tensors = {
            hf: Unjoined(shape, weights[0]) for hf, shape in self.hf_slice_shapes(shard).items()
        }
        for rank, weight in enumerate(weights):
            for piece in self.copy_ranges(
                ShardSpec(shard.shape, shard.kind, rank, len(weights), shard.config)
            ):
                tensors[piece.hf].pieces.append((piece, piece.of_shard(weight)))
        return tensors

    def _by_name(self, hf_weights: HFWeights) -> dict[str, Tensor]:
        if isinstance(hf_weights, Tensor):
            (name,) = self.hf_names
            return {name: hf_weights}
        if isinstance(self.hf_param, str):
            return dict(hf_weights)
        return {name: hf_weights[role] for role, name in self.hf_param.items()}

    pp_group = _GroupNow(exchange.pipeline_group)  # group of the pipeline stages
    ep_group = _GroupNow(exchange.expert_group)  # group of the expert-parallel ranks
    _tp_group = _GroupNow(exchange.tensor_group)
    _etp_group = _GroupNow(exchange.expert_tensor_group)

    @property
    def is_expert(self) -> bool:
        return exchange.is_expert(self.megatron_param)

    @property
    def is_grouped_export(self) -> bool:
        """Whether an export needs the tasks of all experts of a layer together."""
        return self.is_stacked

    @property
    def group_key(self) -> str:
        """Equal for the tasks that an export must convert together."""
        return ",".join(self.hf_names)

    @property
    def tp_group(self) -> Any:
        """The group over which the parameter is sharded."""
        return self._etp_group if self.is_expert else self._tp_group

    tp_rank, tp_size = _rank_properties("tp_group")
    pp_rank, pp_size = _rank_properties("pp_group")
    ep_rank, ep_size = _rank_properties("ep_group")

    def gather_from_tp_ranks(self, tensor: Tensor) -> list[Tensor]:
        """Return the shards of all ranks of ``tp_group`` in rank order; a collective."""
        return exchange.all_gather(tensor, self.tp_group, self.tp_size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.megatron_param!r}, {self.hf_param!r})"


@cache
def _takes_roles(mapping: Any) -> bool:
    """Return whether the constructor of a mapping class takes names by role instead of ``hf_param``."""
    return "hf_param" not in inspect.signature(mapping).parameters


class DirectMapping(MegatronParamMapping):
    """The same tensor on both sides, full on every rank."""

    kind = "replicated"


class ReplicatedMapping(DirectMapping):
    """The same tensor on both sides, full on every tensor-parallel rank."""


class OneRowMapping(ReplicatedMapping):
    """A vector that Hugging Face stores as a matrix with one row."""

    def __init__(self, megatron_param: str, hf_param: HFNames) -> None:
        super().__init__(megatron_param, hf_param)
        self.is_stacked = True
        self.expert = 0

    def resolve(self, captures: Iterable[str]) -> Self:
        """Return the mapping of a concrete parameter; the row has no wildcard."""
        values = tuple(captures)
        return self.renamed(
            lambda name: substitute(name, values), lambda name: substitute(name, values)
        )

    def hf_shapes(self, shard: ShardSpec) -> dict[str, tuple[int, ...]]:
        return {hf: (1, *shape) for hf, shape in self.hf_slice_shapes(shard).items()}


class HeadRatesMapping(OneRowMapping):
    """A value per head, [1, heads / size, 1], that Hugging Face stores as [1, 1, heads, 1]."""

    kind = "row"


class ColumnParallelMapping(MegatronParamMapping):
    """Sharded along the output dimension: weight [out / size, in], bias [out / size]."""

    kind = "column"


class RowParallelMapping(MegatronParamMapping):
    """Sharded along the input dimension: weight [out, in / size]; every rank has the full bias."""

    kind = "row"


class AutoMapping(MegatronParamMapping):
    """Sharded like the module that owns the parameter."""

    @staticmethod
    def register_module_type(name: str, kind: ParallelKind) -> None:
        """Register how a module class shards its parameters.

        Args:
            name: class name; the registration also applies to subclasses.
            kind: ``column``, ``row`` or ``replicated``.
        """
        assert kind in ("column", "row", "replicated"), kind
        _MODULE_KINDS[name] = kind


@dataclass(frozen=True)
class AttentionHeads:
    """Attention heads without the padding heads that a provider adds for tensor parallelism."""

    queries: int
    groups: int
    width: int

    @classmethod
    def of(cls, config: Any) -> "AttentionHeads":
        declared = (
            config.num_attention_heads,
            config.num_query_groups or config.num_attention_heads,
        )
        queries, groups = getattr(config, "unpadded_heads", declared)
        return cls(queries, groups, config.kv_channels or config.hidden_size // queries)

    def wide(self, kind: str, by_head: bool = False) -> int:
        """Return the total width of all query heads (``queries``) or all ``groups``, or their number if ``by_head``."""
        return (1 if by_head else self.width) * (self.queries if kind == "queries" else self.groups)


_MODULE_KINDS: dict[str, ParallelKind] = {
    "ColumnParallelLinear": "column",
    "VocabParallelEmbedding": "column",
    "TEColumnParallelLinear": "column",
    "TELayerNormColumnParallelLinear": "column",
    "TEColumnParallelGroupedLinear": "column",
    "RowParallelLinear": "row",
    "TERowParallelLinear": "row",
    "TERowParallelGroupedLinear": "row",
}


def parallel_kind(module: nn.Module, parameter: Tensor) -> ParallelKind:
    """Return how ``parameter`` of ``module`` is sharded: by Megatron's attributes, or else by its module class."""
    if getattr(parameter, "tensor_model_parallel", False):
        return "row" if cast(Any, parameter).partition_dim == 1 else "column"
    for cls in type(module).__mro__:
        kind = _MODULE_KINDS.get(cls.__name__)
        if kind is not None:
            # every rank has the full weight of a norm that is fused into a column-parallel layer
            is_norm = parameter is getattr(
                module, "layer_norm_weight", None
            ) or parameter is getattr(module, "layer_norm_bias", None)
            return "replicated" if is_norm else kind
    return "replicated"
