# SPDX-License-Identifier: Apache-2.0
"""How layers with adapters are recognized by what is below the package that makes them."""

from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

ADAPTER = "adapter"  # the child under which an adapted layer keeps what was added to it


@dataclass(frozen=True)
class LowRankPart:
    """``scaling * B A``, added to one weight or to the rows of one of its roles; this rank's shard."""

    a: Tensor  # [rank, inputs of this rank]
    b: Tensor  # [outputs of this rank, rank]
    alpha: float  # numerator of the scaling
    use_rslora: bool  # the denominator is the square root of the rank, not the rank
    dropout: float  # probability on the inputs
    role: str | None = None  # ``q``, ``k``, ``v``, ``gate`` or ``up`` of a fused weight; None is all of it
    magnitude: Tensor | None = None  # [outputs of this rank], of DoRA


@runtime_checkable
class AdaptedModule(Protocol):
    """A layer with an adapter."""

    def merged_weight(self, weight: Tensor) -> Tensor:
        """The weight of a model without adapters that computes the same; collective over its shards' ranks."""
        ...

    def low_rank_parts(self, weight: Tensor) -> list[LowRankPart]:
        """The adapter's contribution to ``weight``, as views that can be written to."""
        ...


def in_adapter(name: str) -> bool:
    """Whether a parameter, or module, belongs to an adapter."""
    return f".{ADAPTER}." in f".{name}."


def mark_whole(parameter: Tensor) -> None:
    """Record that a parameter of the base model is trained and belongs with the adapters."""
    cast(Any, parameter).trained_beside_adapters = True


def is_whole(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "trained_beside_adapters", False))
