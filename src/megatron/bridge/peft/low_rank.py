# SPDX-License-Identifier: Apache-2.0
"""The low-rank path of a linear layer: ``scaling * B A x`` with A [rank, inputs] and B [outputs, rank].

If the layer's weight is sharded, the factor on the same side is sharded alike, and the other one is replicated. Ranks
exchange only the narrow activations [tokens, rank], which are gathered or summed between A and B, so that outputs and
gradients are those of one process.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn

from megatron.bridge.backends.moe.grouped_experts import grouped_matmul
from megatron.bridge.models.conversion.adapters.adapted_layers import LowRankPart
from megatron.bridge.peft import principal
from megatron.bridge.peft.targets import Site

Init = Literal["xavier", "kaiming", "normal", "zero"]


@dataclass(frozen=True)
class LoRAShape:
    """LoRA hyperparameters of one layer."""

    rank: int  # of the two factors
    alpha: float  # numerator of the scaling
    # divide by the square root of the rank (https://arxiv.org/abs/2312.03732) instead of the rank
    use_rslora: bool = False
    dropout: float = 0.0  # probability, on the inputs or on the outputs of the path
    # ``pre`` is on the inputs, as in the LoRA paper; ``post`` on the outputs
    dropout_position: Literal["pre", "post"] = "pre"
    init_a: Init = "xavier"  # how A starts
    init_b: Init = "zero"  # how B starts
    seed: int = 0  # seed of all adapters; each draws from a separate generator
    # ``pissa`` or ``pissa_niter_<number>``: A and B start as the principal part of the weight
    principal: str | None = None
    is_filled_later: bool = False  # whether the values are loaded, so that none are computed

    @property
    def scaling(self) -> float:
        """The factor of ``B A x``."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class LowRank(nn.Module):
    """A and B for one layer, or for some of a fused layer's outputs; for one weight or one per expert.

    Attributes:
        a: [experts?, rank, inputs of this rank].
        b: [experts?, halves?, outputs of this rank, rank]; gates and values lie apart, as each is cut by itself.
        initial: With PiSSA, the frozen first values, whose product is taken out of the weight.
    """

    scales_outputs = False
    """Whether the layer's own outputs are multiplied, so that a bias must be taken out of them before."""

    def __init__(
        self,
        site: Site,
        shape: LoRAShape,
        part: str = "",
        row_indices: Tensor | None = None,
    ) -> None:
        """Adapt ``site``.

        Args:
            site: The layer.
            shape: Hyperparameters.
            part: Role of the outputs that are adapted, if it is not the complete layer.
            row_indices: Rows of the weights on this rank that compute this part.
        """
        super().__init__()
        weight = site.weights[0]
        a_size, b_size = self._set_layout(site, shape, row_indices)
        self.a = self._parameter(weight, *a_size)
        self.b = self._parameter(weight, *b_size)
        self._mark(self.a, cut=site.kind == "row", dim=self.a.ndim - 1)
        self._mark(self.b, cut=site.kind == "column", dim=self.b.ndim - 2)
        name = f"{site.name}.{part}" if part else site.name
        self.initial: LowRank | None = None
        if shape.principal is None:
            self.reset_parameters(name)
            return
        frozen_shape = replace(shape, principal=None, init_a="zero", init_b="zero", dropout=0.0)
        self.initial = LowRank(site, frozen_shape, part, row_indices).requires_grad_(False)
        self._start_from_weights(site, name, row_indices)

    def _set_layout(
        self, site: Site, shape: LoRAShape, row_indices: Tensor | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Record how the layer is cut; return the sizes of A and B on this rank."""
        weight = site.weights[0]
        self.shape = shape
        self.kind = site.kind
        self.experts = site.experts
        self.group = site.group
        self.sequence_parallel = site.sequence_parallel
        self.halves = site.halves if row_indices is None else 1
        rows = weight.shape[0] if row_indices is None else len(row_indices)
        halves = (self.halves, rows // self.halves) if self.halves > 1 else (rows,)
        stack = () if site.experts is None else (site.experts,)
        return (*stack, shape.rank, weight.shape[1]), (*stack, *halves, shape.rank)

    def _parameter(self, weight: nn.Parameter, *size: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(size, dtype=weight.dtype, device=weight.device))
        parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        return parameter

    @property
    def total_rank(self) -> int:
        """Numbers per token between the factors."""
        return self.shape.rank * (1 if self.initial is None else 2)

    def _mark(self, parameter: nn.Parameter, cut: bool, dim: int) -> None:
        """Tell Megatron-Core which ranks have replicas, and whether their gradients must be summed."""
        set_tensor_model_parallel_attributes(parameter, cut, dim if cut else -1, 1)
        parameter.sequence_parallel = self.sequence_parallel and not cut  # type: ignore[attr-defined]

    @torch.no_grad()
    def reset_parameters(self, name: str) -> None:
        """Initialize all of A and B, by layer and expert, the same under any layout; keep this rank's shard."""
        factors: tuple[tuple[str, Tensor, Init], ...] = (
            ("a", self.a, self.shape.init_a),
            ("b", self.b, self.shape.init_b),
        )
        for kind, parameter, init in factors:
            for expert, local in self._each_expert(parameter):
                generator = torch.Generator().manual_seed(
                    zlib.crc32(f"{name}.{kind}.{expert}".encode()) + self.shape.seed
                )
                local.copy_(
                    self._part(_draw_factor(self._whole_size(kind, local), init, generator), local)
                )

    @torch.no_grad()
    def _start_from_weights(self, site: Site, name: str, row_indices: Tensor | None) -> None:
        """Start A and B, and the copies of their first values, as the principal part of the weights.

        The factors are those of the full matrix, the same under any layout.

        Args:
            site: The layer.
            name: Name of the layer, or of its part.
            row_indices: Rows of the weights that are adapted; None is all of them.
        """
        assert self.initial is not None, "there are copies of the first values"
        if self.shape.is_filled_later or site.weights[0].is_meta:
            for parameter in (self.a, self.b):
                parameter.zero_()
            return
        factors = zip(self._each_expert(self.a), self._each_expert(self.b), strict=True)
        for weight, ((expert, local_a), (_, local_b)) in zip(site.weights, factors, strict=True):
            rows = weight if row_indices is None else weight[row_indices.to(weight.device)]
            matrix = principal.gather_matrix(rows.unflatten(0, tuple(local_b.shape[:-1])), site)
            full_b_size = (*matrix.shape[:-1], self.shape.rank)
            matrix = matrix.flatten(0, -2)
            principal.check_rank(self.shape.rank, matrix, name)
            seed = zlib.crc32(f"{name}.{expert}".encode()) + self.shape.seed
            a, b = principal.compute_factors(
                matrix / self.shape.scaling,
                self.shape.rank,
                str(self.shape.principal),
                torch.Generator().manual_seed(seed),
            )
            a, b = a.contiguous(), b.contiguous()
            principal.share_factors((a, b), site)
            local_a.copy_(self._part(a, local_a))
            local_b.copy_(self._part(b.view(full_b_size), local_b))
        self.initial.a.copy_(self.a)
        self.initial.b.copy_(self.b)

    def _each_expert(self, parameter: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(index in the whole model, values) of each local expert; (0, all) for a single weight."""
        if self.experts is None:
            yield 0, parameter
            return
        first = parallel_state.get_expert_model_parallel_rank() * self.experts
        yield from enumerate(parameter, first)

    def _whole_size(self, kind: str, local: Tensor) -> list[int]:
        size = list(local.shape)
        if (self.kind, kind) in (("row", "a"), ("column", "b")):
            size[-1 if kind == "a" else -2] *= self.group.size()
        return size

    def _part(self, full_factor: Tensor, local: Tensor) -> Tensor:
        for dim, (size, local_size) in enumerate(zip(full_factor.shape, local.shape, strict=True)):
            if size != local_size:
                return full_factor.narrow(dim, self.group.rank() * local_size, local_size)
        return full_factor

    def forward(self, x: Tensor, counts: Sequence[int] | None = None) -> Any:
        """The low-rank path; see ``path``. Subclasses compute the layer's outputs from it.

        Use the factors only through a call of their module: with an overlapped parameter gather, the call waits for
        fresh values.
        """
        return self.path(x, counts)

    def path(self, x: Tensor, counts: Sequence[int] | None) -> Tensor:
        """``scaling * B A x``, less that of the first factors with PiSSA, as this rank's part of the outputs.

        Args:
            x: What the layer multiplies: [..., inputs]; of experts, tokens in their order.
            counts: Tokens of each local expert.
        """
        initial = None if self.initial is None else self.initial(x, counts)
        delta = self._trained_path(x, counts)
        return delta if initial is None else delta - initial

    def _trained_path(self, x: Tensor, counts: Sequence[int] | None) -> Tensor:
        pre = self.shape.dropout_position == "pre"
        if pre:
            x = self._dropped(x, differ=self.kind == "row" or self.sequence_parallel)
        if counts is None:
            a = self.a.to(x.dtype)
            b = self.b.to(x.dtype)
            delta = F.linear(self._exchanged(F.linear(x, a)), _rows_in_order(b, self.halves))
        else:
            a = self._summed_grads(self.a, "row")
            b = self._summed_grads(self.b, "column")
            delta = _per_expert(_per_expert(x, a, counts), _rows_in_order(b, self.halves), counts)
        delta = delta * self.shape.scaling
        if pre:
            return delta
        return self._dropped(delta, differ=self.kind == "column" or self.sequence_parallel)

    def _exchanged(self, middle: Tensor) -> Tensor:
        """Communicate between A and B: gather sequences for sharded outputs, sum for sharded inputs."""
        if self.group.size() == 1:
            return middle
        if self.kind == "column" and self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(middle, group=self.group)
        if self.kind == "column":
            return tensor_parallel.copy_to_tensor_model_parallel_region(middle, group=self.group)
        if self.kind == "row" and self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(
                middle, group=self.group
            )
        if self.kind == "row":
            return tensor_parallel.reduce_from_tensor_model_parallel_region(
                middle, group=self.group
            )
        return middle

    def _summed_grads(self, parameter: Tensor, cut: str) -> Tensor:
        """A factor of experts; if it is replicated, gradients are summed over ranks, which each compute a part."""
        if self.group.size() == 1 or self.kind == cut:
            return parameter
        return tensor_parallel.copy_to_tensor_model_parallel_region(parameter, group=self.group)

    def _dropped(self, x: Tensor, differ: bool) -> Tensor:
        if not self.shape.dropout or not self.training:
            return x
        with self._generator(differ):
            return F.dropout(x, self.shape.dropout)

    def _generator(self, differ: bool) -> AbstractContextManager[Any]:
        """The generator shared by ranks that hold the same values, or else one for each rank."""
        if not differ or self.group.size() == 1:
            return nullcontext()
        tracker: Any = tensor_parallel.get_cuda_rng_tracker()
        return (
            tracker.fork(get_expert_parallel_rng_tracker_name())
            if self.experts is not None
            else tracker.fork()
        )

    def delta_weight(self, index: int) -> Tensor:
        """``scaling * B A`` of this rank in fp32, [outputs, inputs], of one of the weights."""
        part = self.part(index)
        return (part.b.float() @ part.a.float()).mul_(self.shape.scaling)

    def stacked_delta(self) -> Tensor:
        """``delta_weight`` of all weights, [weights, outputs, inputs]."""
        return torch.stack([self.delta_weight(index) for index in range(self.experts or 1)])

    def part(
        self, expert: int, role: str | None = None, magnitude: Tensor | None = None
    ) -> LowRankPart:
        """What is added to one of the weights; with PiSSA, an ordinary part of twice the rank."""
        a, b = (self.a, self.b) if self.experts is None else (self.a[expert], self.b[expert])
        dropout = self.shape.dropout if self.shape.dropout_position == "pre" else 0.0
        rows = _rows_in_order(b, self.halves)
        use_rslora = self.shape.use_rslora
        alpha = self.shape.alpha
        if self.initial is None:
            return LowRankPart(a, rows, alpha, use_rslora, dropout, role, magnitude)
        first = self.initial.part(expert)
        return LowRankPart(
            torch.cat([a, first.a]),
            torch.cat([rows, -first.b], dim=1),
            alpha * (math.sqrt(2) if use_rslora else 2),  # the same scaling with twice the rank
            use_rslora,
            dropout,
            role,
            magnitude,
            is_view=False,
        )

    @torch.no_grad()
    def negate(self) -> None:
        """Change the sign of what is added to the weights."""
        self.b.neg_()
        if self.initial is not None:
            self.initial.b.neg_()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The factors as shards of whole ones, under any layout; all experts are one tensor."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, Any] = {
            f"{prefix}{name}": self._sharded(
                f"{prefix}{name}", parameter, sharded_offsets, metadata
            )
            for name, parameter in self.named_parameters(recurse=False)
        }
        if self.initial is not None:
            state |= self.initial.sharded_state_dict(f"{prefix}initial.", sharded_offsets, metadata)
        return state

    def _sharded(
        self, key: str, parameter: nn.Parameter, offsets: tuple, metadata: dict
    ) -> ShardedTensor:
        first = len(offsets)
        cuts = list(offsets)
        if self.experts is not None:
            ranks = parallel_state.get_expert_model_parallel_world_size()
            cuts.append((first, parallel_state.get_expert_model_parallel_rank(), ranks))
        cut: bool = parameter.tensor_model_parallel  # type: ignore[attr-defined]
        if cut:
            cuts.append((first + parameter.partition_dim, self.group.rank(), self.group.size()))  # type: ignore
        copies = metadata["dp_cp_group"].rank()
        if self.experts is not None:
            copies = parallel_state.get_expert_data_parallel_rank()
        replica = (0, 0 if cut else self.group.rank(), copies)
        return ShardedTensor.from_rank_offsets(
            key, parameter, *cuts, replica_id=replica, prepend_axis_num=first
        )


def _rows_in_order(b: Tensor, halves: int) -> Tensor:
    """B in the order of the layer's outputs: [experts?, outputs, rank]."""
    return b.flatten(-3, -2) if halves > 1 else b


def _per_expert(x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Each expert's tokens times its weight, [tokens, out]; one kernel on GPUs if 8 divides the rank."""
    return grouped_matmul(x, list(counts), weights.to(x.dtype).unbind())


def _draw_factor(size: Sequence[int], init: Init, generator: torch.Generator) -> Tensor:
    """Initial values of the whole factor of one weight, in fp32 on the CPU; gates and values are both outputs."""
    drawn = torch.empty(math.prod(size[:-1]), size[-1])
    if init == "zero":
        nn.init.zeros_(drawn)
    elif init == "xavier":
        nn.init.xavier_normal_(drawn, generator=generator)
    elif init == "kaiming":
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    else:
        nn.init.normal_(drawn, std=0.02, generator=generator)
    return drawn.view(*size)
