# SPDX-License-Identifier: Apache-2.0
"""Predict the time of kernels by the roofline model: operations or bytes at a reachable rate."""

import math
from dataclasses import dataclass

from megatron.bridge.autotune.efficiency import Direction, Precision
from megatron.bridge.autotune.gpus import Gpu
from megatron.bridge.autotune.time.collectives import AlphaBeta
from megatron.bridge.autotune.time.work import Cost

# Fraction of the rate of dense products for grouped products of experts with many tokens, on Hopper in FP8. DeepGEMM's
# README of 2025-04: 1,214 to 1,346 TFLOP/s for 4,096 tokens, 1.2 to 1.3 times the rate of kernels of CUTLASS. For the
# gradient of the weight, which is added in fp32: 813 to 873 on H200 (DeepGEMM issue 107), which its authors call
# similar to cuBLAS (issue 125). On Blackwell only torch._grouped_mm is known: 860 to 900 in bf16 on B200, forward and
# backward (torchao's README, 2025-10), which is 0.57 of the dense rate.
GROUPED_EFFICIENCY = 0.87
GROUPED_GRADIENT_EFFICIENCY = 0.70

# Tokens of an expert at which grouped products run at half their rate. In the same README, 256 tokens reach 0.70 to
# 0.74 of the rate of 4,096, 512 reach 0.8, and 1,024 reach 0.8 to 0.97.
GROUPED_HALF = 100

# Bytes of the inner dimension at which products run at half their rate, because each tile of the output has to start
# and end. In the same README, 4,096 tokens reach in FP8, of the rate with an inner dimension of 7,168: 0.90 and 0.92
# with 2,048, 0.89 with 1,536, and 0.59 with 512. ``Efficiency.matrix`` is the rate with INNER_FULL.
INNER_HALF = 300
INNER_FULL = 8192
_NUMBER: dict[Precision, float] = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}  # bytes

# Keys of a query at which fused attention runs at half its rate, from the results of cuDNN that efficiency.yaml names:
# it meets causal attention over 2,048 to 32,768 tokens on H200, GB200 and GB300 within 10 %. Windows of 128 tokens on
# GB300, with heads of 64, take longer: a third forward, 2 % backward.
ATTENTION_HALF = 600

# Width of heads at which attention reaches its rate; below it by the square root: windows of 1,024 with heads of 64 in
# the same results on H200, and 45.6 ms of attention in a step of Llama 3.2 1B that this project measured on an H100.
FULL_HEAD = 128

# Seconds from the end of a short kernel to the start of the next: CUDA launches take 3 to 5 us.
LAUNCH = 4e-6

# How much longer than the average GPU the slowest of 2^SLOWEST_AT computes, while the others wait: half of the 8 % by
# which equal GPUs of a cluster differ on average (Sinha et al., SC22, arXiv 2208.11035).
SLOWEST = 0.04
SLOWEST_AT = 8

# Elements of the output tile that one multiprocessor computes at a time in cuBLAS's large kernels.
_TILE = (128, 256)
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Roofline:
    """Kernel times on one GPU in seconds; ``precision`` is the precision of the layers' matrix products."""

    card: Gpu
    precision: Precision = "bf16"

    def matrix(self, tokens: float, rows: int, columns: int, count: int = 1, quantized: bool = True) -> float:
        """Time ``count`` products of ``tokens`` x ``columns`` with ``columns`` x ``rows`` in one grouped kernel.

        Products that are not ``quantized`` run in bf16.
        """
        precision: Precision = self.precision if quantized else "bf16"
        operations = 2.0 * tokens * rows * columns * count
        moved = count * (_NUMBER[precision] * columns * (tokens + rows) + 2.0 * tokens * rows)
        rate = self._rate(precision) * _filled(tokens, rows, count) * _deep(columns, precision)
        if count > 1:
            rate *= GROUPED_EFFICIENCY * tokens / (tokens + GROUPED_HALF)
        return max(operations / rate, moved / self.bandwidth) + LAUNCH

    def attention(self, operations: float, direction: Direction, seen: float, head: int) -> float:
        """Return the time of fused attention with this number of operations.

        Args:
            seen: Keys of a query, on average.
            head: Width of a head.
        """
        rate = self.card.bf16 * self.card.efficiency.attention[direction] * min(1.0, head / FULL_HEAD) ** 0.5
        return operations / rate * (1 + ATTENTION_HALF / seen) + LAUNCH

    def moved(self, size: float, kernels: int = 1) -> float:
        """Return the time of kernels that only read and write ``size`` bytes in total."""
        return size / self.bandwidth + kernels * LAUNCH

    def measured(self, name: str, operations: float, cost: Cost) -> Cost:
        """Scale ``cost`` to the measured time of a real layer's pass, if there is one."""
        return cost

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


def _deep(columns: int, precision: Precision) -> float:
    """Return the rate with this inner dimension as a part of the rate with ``INNER_FULL``."""
    half = INNER_HALF / _NUMBER[precision]
    return (1 + half / INNER_FULL) / (1 + half / columns)


def _filled(tokens: float, rows: int, count: int) -> float:
    """Return the fraction of multiprocessors that compute, averaged over the waves of tiles."""
    tiles = count * max(tokens / _TILE[0], 1.0) * max(rows / _TILE[1], 1.0)
    waves = tiles / _MULTIPROCESSORS
    # persistent kernels split the last wave, which costs about half of its idle time
    return waves / (waves + 0.5 * (-(-waves // 1) - waves))
