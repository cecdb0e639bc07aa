# SPDX-License-Identifier: Apache-2.0
"""Predict the time of kernels by the roofline model: operations or bytes at a reachable rate."""

import math
from dataclasses import dataclass

from megatron.bridge.autotune.efficiency import Direction, Precision
from megatron.bridge.autotune.gpus import Gpu
from megatron.bridge.autotune.time.collectives import AlphaBeta
from megatron.bridge.autotune.time.work import Cost, LayerShape

# docs/tuner.md lists the origins of these numbers.
GROUPED_EFFICIENCY = 0.87
"""Efficiency of grouped GEMMs (experts with many tokens) relative to dense GEMMs."""
GROUPED_GRADIENT_EFFICIENCY = 0.70
"""The same for weight gradients, which are accumulated in fp32."""
GROUPED_HALF = 100
"""Tokens per expert at which a grouped GEMM reaches half of its full rate."""
INNER_HALF = 300
"""Bytes of the inner dimension at which a GEMM reaches half of its full rate: each tile has a prologue and epilogue."""
INNER_FULL = 8192
"""Inner dimension at which a GEMM has the rate of ``Efficiency.matrix``."""
ATTENTION_HALF = 600
"""Keys per query at which attention reaches half of its full rate."""
FULL_HEAD = 128
"""Head width with the full rate of attention, which falls with the square root for narrower heads."""
LAUNCH = 4e-6  # seconds from the end of a short kernel to the start of the next
HOST_OF_LAYER: dict[Direction, float] = {"forward": 1.1e-3, "backward": 1.1e-3}
"""CPU seconds in which Python and autograd run a layer whose kernels take no time."""
HOST_OF_EXPERTS: dict[Direction, float] = {"forward": 2.2e-3, "backward": 2.1e-3}
"""The same for a layer with a router and experts."""
SLOWEST = 0.04
"""Straggler factor: how much longer the slowest of 2^SLOWEST_AT GPUs computes than their mean."""
SLOWEST_AT = 8

_NUMBER: dict[Precision, float] = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}  # bytes
_TILE = (
    128,
    256,
)  # output elements that one multiprocessor computes at a time in cuBLAS's large kernels
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Roofline:
    """Kernel times on one GPU in seconds; ``precision`` is the precision of the layers' matrix products."""

    card: Gpu
    precision: Precision = "bf16"
    fp8_attention: bool = False

    def matrix(
        self, tokens: float, rows: int, columns: int, count: int = 1, quantized: bool = True
    ) -> float:
        """Time ``count`` products of ``tokens`` x ``columns`` with ``columns`` x ``rows`` in one grouped kernel.

        Products that are not ``quantized`` run in bf16.
        """
        precision: Precision = self.precision if quantized else "bf16"
        operations = 2.0 * tokens * rows * columns * count
        moved = count * (_NUMBER[precision] * columns * (tokens + rows) + 2.0 * tokens * rows)
        rate = (
            self._rate(precision)
            * _filled_share(tokens, rows, count)
            * _inner_rate(columns, precision)
        )
        if count > 1:
            rate *= GROUPED_EFFICIENCY * tokens / (tokens + GROUPED_HALF)
        return max(operations / rate, moved / self.bandwidth) + LAUNCH

    def attention(self, operations: float, direction: Direction, seen: float, head: int) -> float:
        """Return the time of fused attention with this number of operations.

        Args:
            seen: Keys of a query, on average.
            head: Width of a head.
        """
        reached = (
            self.card.efficiency.fp8_attention
            if self.fp8_attention
            else self.card.efficiency.attention
        )
        rate = self.card.bf16 * reached[direction] * min(1.0, head / FULL_HEAD) ** 0.5
        return operations / rate * (1 + ATTENTION_HALF / seen) + LAUNCH

    def moved(self, size: float, kernels: int = 1) -> float:
        """Return the time of kernels that only read and write ``size`` bytes in total."""
        return size / self.bandwidth + kernels * LAUNCH

    def measured(self, name: str, operations: float, cost: Cost) -> Cost:
        """Scale ``cost`` to the measured time of a real layer's pass, if there is one."""
        return cost

    def host(self, layer: LayerShape, direction: Direction) -> float:
        """Return the CPU seconds in which a pass of ``layer`` is launched, kernel by kernel.

        The GPU works on earlier kernels meanwhile, so a pass takes as long as the slower of the two.
        """
        return (HOST_OF_EXPERTS if layer.experts else HOST_OF_LAYER)[direction]

    def slowest(self, world_size: int) -> float:
        """Return how long the slowest of ``world_size`` GPUs computes, as a multiple of the average."""
        return 1 + SLOWEST * min(1.0, math.log2(world_size) / SLOWEST_AT)

    @property
    def links(self) -> AlphaBeta:
        return AlphaBeta(self.card)

    @property
    def overlaps(self) -> bool:
        """Whether communication and computation run at the same time."""
        return True

    @property
    def crowding(self) -> float:
        """Number of processes that share a core or a GPU."""
        return 1.0

    @property
    def bandwidth(self) -> float:
        return self.card.bandwidth * self.card.efficiency.bandwidth

    def _rate(self, precision: Precision) -> float:
        peak = {"bf16": self.card.bf16, "fp8": self.card.fp8, "fp4": self.card.fp4}[precision]
        return peak * self.card.efficiency.matrix[precision]


def _inner_rate(columns: int, precision: Precision) -> float:
    """Return the rate with this inner dimension as a part of the rate with ``INNER_FULL``."""
    half = INNER_HALF / _NUMBER[precision]
    return (1 + half / INNER_FULL) / (1 + half / columns)


def _filled_share(tokens: float, rows: int, count: int) -> float:
    """Return the fraction of multiprocessors that compute, averaged over the waves of tiles."""
    tiles = count * max(tokens / _TILE[0], 1.0) * max(rows / _TILE[1], 1.0)
    waves = tiles / _MULTIPROCESSORS
    # persistent kernels split the last wave, which costs about half of its idle time
    return waves / (waves + 0.5 * (-(-waves // 1) - waves))
