# SPDX-License-Identifier: Apache-2.0
"""The work of a layer on one rank, as plain numbers, and the time that it costs."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Matrix:
    """A weight on one rank: ``rows`` output features and ``columns`` input features."""

    name: str
    rows: int
    columns: int
    trained: bool = True


@dataclass(frozen=True)
class LayerShape:
    """One layer on one rank of a tensor and an expert tensor group.

    Attributes:
        matrices: They multiply each token of the rank's part of the sequence.
        router: It multiplies the tokens of one sequence-parallel rank.
        experts: Those of one expert.
        between: Forward operations of one token between the matrices: attention, or the scan of a mixer.
        quadratic: Whether ``between`` is attention, which runs in a fused kernel.
        norms: Over the hidden size.
        inner: Numbers of a token that activations and rotary embeddings read or write.
        blocks: Row-parallel matrices that end in the residual stream, of experts left out.
        keys: Width of the keys and values of a token, for context parallelism.
        weights: Parameters, those of experts left out.
        expert_weights: Parameters of one expert.
        expert_biases: Whether experts have biases.
        trained: Part of the parameters that get gradients.
    """

    matrices: tuple[Matrix, ...]
    router: tuple[Matrix, ...]
    experts: tuple[Matrix, ...]
    between: float
    quadratic: bool
    norms: int
    inner: int
    blocks: int
    keys: int
    weights: int
    expert_weights: int
    expert_biases: bool = False
    trained: float = 1.0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a search looks shapes up millions of times."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Cost:
    """Seconds by kind of work.

    Attributes:
        matrix: Matrix products.
        attention: Attention and the scans of mixers.
        memory: Norms, activations, permutations: kernels that are bound by the memory's bandwidth.
        recompute: Forward work that the backward pass repeats.
        tensor: Exposed communication of tensor parallelism.
        context: Exposed communication of context parallelism.
        expert: Exposed communication of expert parallelism.
    """

    matrix: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(x + y for x, y in zip(self.parts().values(), other.parts().values(), strict=True)))

    def __mul__(self, factor: float) -> "Cost":
        return Cost(*(x * factor for x in self.parts().values()))

    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _KINDS}

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    @property
    def compute(self) -> float:
        return self.matrix + self.attention + self.memory


_KINDS = tuple(field.name for field in fields(Cost))


@dataclass(frozen=True)
class Run:
    """What decides the cost of a layer beside its shape.

    Attributes:
        tokens: Of a microbatch on a context rank.
        hidden: Size of the residual stream.
        tensor: Tensor ranks.
        context: Context ranks.
        expert: Expert ranks.
        expert_tensor: Ranks that share an expert.
        local_experts: Experts on a rank.
        top_k: Experts of a token.
        sequence_parallel: Whether norms and the residual stream are split over tensor ranks.
        tensor_overlap: ``tp_comm_overlap``.
        expert_overlap: ``overlap_moe_expert_parallel_comm``.
        context_kind: ``cp_comm_type``: ``p2p``, ``all_gather``, ``a2a`` or ``a2a+p2p``.
        recompute: Part of a layer's forward work that the backward pass repeats.
        number: Bytes of an activation.
        imbalance: Tokens of the busiest expert rank over the average.
    """

    tokens: int
    hidden: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    local_experts: int = 1
    top_k: int = 0
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    expert_overlap: bool = False
    context_kind: Any = None
    recompute: float = 0.0
    number: int = 2
    imbalance: float = 1.0

    @property
    def between(self) -> float:
        """Tokens of the residual stream on one rank."""
        return self.tokens / self.tensor if self.sequence_parallel else self.tokens

    @property
    def chosen(self) -> float:
        """Tokens of all experts of a rank."""
        split = self.tokens / self.tensor
        return split * self.top_k * self.expert_tensor * self.imbalance
