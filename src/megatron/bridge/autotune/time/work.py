# SPDX-License-Identifier: Apache-2.0
"""The work of a layer on one rank in plain numbers, and the time that it takes."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Matrix:
    """A weight on one rank with ``rows`` output features and ``columns`` input features."""

    name: str
    rows: int
    columns: int
    trained: bool = True


@dataclass(frozen=True)
class LayerShape:
    """One layer on one rank of a tensor and an expert tensor group."""

    matrices: tuple[Matrix, ...]  # multiply each token of the rank's part of the sequence
    router: tuple[
        Matrix, ...
    ]  # and projections around experts: multiply the tokens of one sequence-parallel rank
    experts: tuple[Matrix, ...]  # matrices of one expert
    between: float  # forward operations per token between the matrices: attention, or the scan of a mixer
    scan_bytes: float  # bytes per token that the kernels of a scan write and read forward
    quadratic: bool  # whether ``between`` is attention, which runs in a fused kernel
    norms: int  # norms over the hidden size
    inner: int  # elements per token that activations and rotary embeddings read or write
    blocks: int  # row-parallel matrices that write to the residual stream, without experts
    keys: int  # width of a token's keys and values, for context parallelism
    weights: int  # parameters without experts
    expert_weights: int  # parameters of one expert
    seen: float = 1.0  # keys that a query attends to, on average
    head: int = 128  # width of a head of attention
    expert_biases: bool = False  # whether experts have biases
    clamped: bool = False  # whether activations are clamped
    trained: float = 1.0  # fraction of the parameters that are trained
    backward_scans: float = 2.0  # time of the backward pass of a scan, in forward passes

    @property
    def dispatched(self) -> int:
        """Width of a token that is sent to an expert."""
        return self.experts[0].columns if self.experts else 0

    @property
    def kind(self) -> str:
        """The name under which profiles store measured times of such layers."""
        if self.experts:
            return "experts"
        return "attention" if self.quadratic else "mixer" if self.between else "mlp"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once: a search looks up shapes millions of times."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Cost:
    """Seconds by kind of work."""

    matrix: float = 0.0  # matrix products
    attention: float = 0.0  # attention and the scans of mixers
    memory: float = 0.0  # norms, activations, permutations: kernels limited by memory bandwidth
    recompute: float = 0.0  # forward work that the backward pass recomputes
    tensor: float = 0.0  # exposed communication of tensor parallelism
    context: float = 0.0  # exposed communication of context parallelism
    expert: float = 0.0  # exposed communication of expert parallelism
    host: float = 0.0  # waiting for the CPU to launch kernels

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            *(x + y for x, y in zip(self.parts().values(), other.parts().values(), strict=True))
        )

    def __mul__(self, factor: float) -> "Cost":
        return Cost(*(x * factor for x in self.parts().values()))

    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _KINDS}

    def slowed(self, factor: float) -> "Cost":
        """Return the same cost with computation that takes ``factor`` times as long."""
        names = ("matrix", "attention", "memory", "recompute")
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    @property
    def compute(self) -> float:
        return self.matrix + self.attention + self.memory


_KINDS = tuple(field.name for field in fields(Cost))


@dataclass(frozen=True)
class LayerSettings:
    """Settings that decide the cost of a layer together with its shape."""

    tokens: int  # tokens of a microbatch on a context rank
    hidden: int  # hidden size
    tensor: int = 1  # tensor-parallel ranks
    context: int = 1  # context-parallel ranks
    expert: int = 1  # expert-parallel ranks
    expert_tensor: int = 1  # expert-tensor-parallel ranks
    local_experts: int = 1  # experts on a rank
    top_k: int = 0  # experts per token
    sequence_parallel: bool = (
        False  # whether norms and the residual stream are split over tensor ranks
    )
    tensor_overlap: bool = False  # ``tp_comm_overlap``
    expert_overlap: bool = False  # ``overlap_moe_expert_parallel_comm``
    flex: bool = False  # ``moe_token_dispatcher_type=flex``: DeepEP or HybridEP
    context_kind: Any = None  # ``cp_comm_type``: ``p2p``, ``all_gather``, ``a2a`` or ``a2a+p2p``
    recompute: float = 0.0  # fraction of a layer's forward work that the backward pass recomputes
    number: int = 2  # bytes per activation element
    imbalance: float = 1.0  # tokens of the busiest expert rank divided by the average

    @property
    def between(self) -> float:
        """Tokens of the residual stream on one rank."""
        return self.tokens / self.tensor if self.sequence_parallel else self.tokens

    @property
    def chosen(self) -> float:
        """Token copies that the experts of a rank process."""
        split = self.tokens / self.tensor
        return split * self.top_k * self.expert_tensor * self.imbalance


def operations_per_token(layer: LayerShape, run: LayerSettings) -> float:
    """Return the forward operations per token in ``layer`` on one tensor rank."""
    dense = sum(2 * matrix.rows * matrix.columns for matrix in layer.matrices)
    router = sum(2 * matrix.rows * matrix.columns for matrix in layer.router) / run.tensor
    experts = sum(2 * matrix.rows * matrix.columns for matrix in layer.experts) * run.top_k
    return dense + router + experts * run.expert_tensor / run.tensor + layer.between
