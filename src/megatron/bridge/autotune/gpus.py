# SPDX-License-Identifier: Apache-2.0
"""Memory and speed of the GPUs that recipes name, from NVIDIA's data sheets."""

from dataclasses import dataclass

from megatron.bridge.backends.hardware.device_flops import BF16_TFLOPS
from megatron.bridge.utils.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One type of GPU.

    Attributes:
        memory: Bytes that the data sheet gives.
        bf16: Operations a second of dense bf16 matrix products, at most.
    """

    memory: int
    bf16: float


# Memory from the data sheets that ``backends.peaks`` names.
GPUS: dict[str, Gpu] = {
    "A100 40GB": Gpu(40 * 10**9, BF16_TFLOPS["A100"] * 1e12),
    "A100 80GB": Gpu(80 * 10**9, BF16_TFLOPS["A100"] * 1e12),
    "H100 80GB": Gpu(80 * 10**9, BF16_TFLOPS["H100"] * 1e12),
    "H200 141GB": Gpu(141 * 10**9, BF16_TFLOPS["H200"] * 1e12),
    "B200 180GB": Gpu(180 * 10**9, BF16_TFLOPS["B200"] * 1e12),
    "GB200 186GB": Gpu(186 * 10**9, BF16_TFLOPS["GB200"] * 1e12),
    "B300 270GB": Gpu(270 * 10**9, BF16_TFLOPS["B300"] * 1e12),
}

# Part of the memory that is left to the CUDA context, NCCL's buffers and the allocator's fragments.
RESERVED = 0.1


def gpu(name: str) -> Gpu:
    """The GPU called ``name``.

    Raises:
        UserError: it is not in the table.
    """
    if name not in GPUS:
        raise UserError(
            f"there is no GPU {name!r} in the table{did_you_mean(name, GPUS)}; known: {', '.join(GPUS)}"
        )
    return GPUS[name]


def fits(used: int, name: str) -> bool:
    """Whether ``used`` bytes leave a tenth of the memory of GPU ``name`` free."""
    return used <= (1 - RESERVED) * gpu(name).memory
