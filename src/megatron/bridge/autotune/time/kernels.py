# SPDX-License-Identifier: Apache-2.0
"""Predict the time of kernels by the roofline model: operations or bytes at a reachable rate."""

from dataclasses import dataclass
from typing import Literal

from megatron.bridge.autotune.gpus import Gpu
from megatron.bridge.autotune.time.collectives import AlphaBeta
from megatron.bridge.autotune.time.work import Cost

Direction = Literal["forward", "backward"]
Precision = Literal["bf16", "fp8", "fp4"]

# Fraction of the data sheet's rate that large matrix products sustain in training, by precision; set on 2026-11-22.
# In isolation, cuBLAS reaches 270 of 312 TFLOP/s on A100, 740 of 989 on H100, 1,700 of 2,250 on B200, and in FP8 1,400
# of 1,979 and 3,200 of 4,500; the power limit and gaps between kernels cost another 7 to 12 % of a step.
MATRIX_EFFICIENCY: dict[Precision, float] = {"bf16": 0.70, "fp8": 0.62, "fp4": 0.55}
A100_MATRIX_EFFICIENCY = 0.80

# Fraction of that rate for grouped products of experts, whose token counts differ: DeepGEMM reports 0.65 to 0.8 of
# its dense rate for groups of a few hundred tokens.
GROUPED_EFFICIENCY = 0.7

# Fraction of the bf16 rate that fused causal attention reaches. FlashAttention-2 (Dao, 2023) on A100: 190 of 312
# forward, 170 backward; FlashAttention-3 (Shah et al., 2024) on H100 at 16k tokens: 650 of 989 forward, 550
# backward.
ATTENTION_EFFICIENCY = {"forward": 0.66, "backward": 0.56}

# Fraction of the data sheet's memory bandwidth that copies in BabelStream reach on A100 and H100.
BANDWIDTH_EFFICIENCY = 0.85

# Seconds from the end of a short kernel to the start of the next: CUDA launches take 3 to 5 us.
LAUNCH = 4e-6

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
        moved = 2.0 * count * (tokens * (rows + columns) + rows * columns)
        rate = self._rate(precision) * _filled(tokens, rows, count) * (GROUPED_EFFICIENCY if count > 1 else 1.0)
        return max(operations / rate, moved / self.bandwidth) + LAUNCH

    def attention(self, operations: float, direction: Direction) -> float:
        """Return the time of fused attention with this number of operations."""
        return operations / (self.card.bf16 * ATTENTION_EFFICIENCY[direction]) + LAUNCH

    def moved(self, size: float, kernels: int = 1) -> float:
        """Return the time of kernels that only read and write ``size`` bytes in total."""
        return size / self.bandwidth + kernels * LAUNCH

    def measured(self, name: str, operations: float, cost: Cost) -> Cost:
        """Scale ``cost`` to the measured time of a real layer's pass, if there is one."""
        return cost

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
        return self.card.bandwidth * BANDWIDTH_EFFICIENCY

    def _rate(self, precision: Precision) -> float:
        peak = {"bf16": self.card.bf16, "fp8": self.card.fp8, "fp4": self.card.fp4}[precision]
        before_hopper = not self.card.fp8
        return peak * (A100_MATRIX_EFFICIENCY if before_hopper else MATRIX_EFFICIENCY[precision])


def _filled(tokens: float, rows: int, count: int) -> float:
    """Return the fraction of multiprocessors that compute, averaged over the waves of tiles."""
    tiles = count * max(tokens / _TILE[0], 1.0) * max(rows / _TILE[1], 1.0)
    waves = tiles / _MULTIPROCESSORS
    # persistent kernels split the last wave, which costs about half of its idle time
    return waves / (waves + 0.5 * (-(-waves // 1) - waves))
