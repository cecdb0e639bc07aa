# SPDX-License-Identifier: Apache-2.0
"""Recognize layers with adapters without importing the package that creates them."""

from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

ADAPTER = "adapter"  # name of the child module with the adapter of a layer


@dataclass(frozen=True)
class LowRankPart:
    """``scaling * B A``, the update of one weight or of the rows of one of its roles; this rank's shard."""

    a: Tensor  # [rank, inputs of this rank]
    b: Tensor  # [outputs of this rank, rank]
    alpha: float  # numerator of the scaling factor
    use_rslora: bool  # the denominator is the square root of the rank, not the rank
    dropout: float  # dropout probability of the inputs
    role: str | None = (
        None  # ``q``, ``k``, ``v``, ``gate`` or ``up`` of a fused weight; None is the full weight
    )
    magnitude: Tensor | None = None  # [outputs of this rank], for DoRA
    is_view: bool = True  # whether the adapter's parameters are those of ``a`` and ``b``


@runtime_checkable
class AdaptedModule(Protocol):
    def merged_weight(self, weight: Tensor) -> Tensor:
        """Return the weight with the adapter merged into it; a collective over the ranks of its shards."""
        ...

    def low_rank_parts(self, weight: Tensor) -> list[LowRankPart]:
        """Return the adapter's update of ``weight``, as writable views if ``is_view``."""
        ...


def in_adapter(name: str) -> bool:
    """Return whether a parameter or module belongs to an adapter."""
    return f".{ADAPTER}." in f".{name}."


def mark_whole(parameter: Tensor) -> None:
    """Record that a parameter of the base model is trained and saved with the adapters."""
    cast(Any, parameter).trained_beside_adapters = True


def is_whole(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "trained_beside_adapters", False))
