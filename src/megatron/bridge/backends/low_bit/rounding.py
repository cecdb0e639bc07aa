# SPDX-License-Identifier: Apache-2.0
"""Round weights and activations to the numbers that the formats of ``export --quantize`` can hold.

Quantization-aware training computes with these numbers. They are exactly the ones that an export stores, whose codes
``models/hf_pretrained/quantized_tensors.py`` writes and reads: tests compare both bit by bit. Here nothing is packed,
everything runs on the tensor's own device, and the magnitudes that scales depend on are computed first, because ranks
that hold parts of a matrix may have to exchange them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

QATFormat = Literal[
    "fp8-block", "fp8-tensor", "int8", "mxfp8", "mxfp4", "nvfp4", "int4", "int4-awq"
]
Span = Literal["tensor", "row", "group", "block"]
"""The numbers that share a scale: a matrix, a row, neighbors in a row, or a square block."""

_E4M3_LARGEST = 448.0
_E2M1_LARGEST = 6.0
_INT8_LARGEST = 127.0
_LARGEST_EXPONENT = 127  # of an E8M0 scale


@dataclass(frozen=True)
class Magnitudes:
    """What the scales of a matrix depend on.

    Attributes:
        of_blocks: Largest magnitude of the numbers that share a scale, [block rows, block columns], in float32.
        of_tensor: Largest magnitude of the full matrix, a scalar; used by formats with one scale for it.
    """

    of_blocks: Tensor
    of_tensor: Tensor


@dataclass(frozen=True)
class Rounding:
    """One format.

    Attributes:
        span: The numbers that share a scale.
        size: How many neighbors that are, where the span is a group or a block; the default, where it is free.
        is_size_free: Whether another size can be chosen.
        round_blocks: (numbers [block rows, height, block columns, width] in float32, magnitudes, dtype of the model)
            -> the nearest numbers of the format.
        activations: How engines round the inputs of products whose weights have this format; None keeps them.
        has_tensor_scale: Whether the full matrix has a scale, besides others or alone.
    """

    span: Span
    size: int | None
    is_size_free: bool
    round_blocks: Callable[[Tensor, Magnitudes, torch.dtype], Tensor]
    activations: Callable[[Tensor, Tensor], Tensor] | None = None
    has_tensor_scale: bool = False

    def block(self, shape: torch.Size, size: int | None) -> tuple[int, int]:
        """Return the rows and columns that share a scale in a matrix of ``shape``."""
        length = size or self.size or 0
        return {
            "tensor": (shape[0], shape[1]),
            "row": (1, shape[1]),
            "group": (1, length),
            "block": (length, length),
        }[self.span]

    def magnitudes(self, matrix: Tensor, size: int | None = None) -> Magnitudes:
        """Return the magnitudes of a matrix.

        Args:
            matrix: [rows, columns], in any floating-point dtype.
            size: Neighbors that share a scale; None is the format's default.
        """
        blocks = _in_blocks(matrix, self.block(matrix.shape, size))
        of_blocks = blocks.abs().amax(dim=(1, 3))
        return Magnitudes(of_blocks, of_blocks.amax())

    def round(self, matrix: Tensor, magnitudes: Magnitudes, size: int | None = None) -> Tensor:
        """Return the nearest matrix of the format, in the dtype of ``matrix``.

        Args:
            matrix: [rows, columns], in any floating-point dtype.
            magnitudes: Those of ``magnitudes``, or of all ranks that share scales.
            size: Neighbors that share a scale; None is the format's default.
        """
        blocks = _in_blocks(matrix, self.block(matrix.shape, size))
        rounded = self.round_blocks(blocks, magnitudes, matrix.dtype)
        rows, columns = matrix.shape
        return rounded.flatten(2).flatten(0, 1)[:rows, :columns].to(matrix.dtype)


def _in_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """Return [block rows, height, block columns, width] in float32; the edges are filled with zeros."""
    height, width = block
    padding = (0, -matrix.shape[1] % width, 0, -matrix.shape[0] % height)
    padded = torch.nn.functional.pad(matrix.float(), padding) if any(padding) else matrix.float()
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))


def _nearest_e4m3(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn).float()


def _nearest_e2m1(numbers: Tensor) -> Tensor:
    """Return the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6; halfway, the one with an even code."""
    sizes = numbers.abs()
    halves = (sizes * 2).round() * 0.5
    ones = sizes.round()
    twos = ((sizes * 0.5).round() * 2).clamp(max=_E2M1_LARGEST)
    rounded = torch.where(sizes < 2, halves, torch.where(sizes < 4, ones, twos))
    return rounded.copysign(numbers)


def _over_blocks(values: Tensor) -> Tensor:
    """Return [block rows, 1, block columns, 1]."""
    return values[:, None, :, None]


def _positive(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)


def _round_scaled_e4m3(blocks: Tensor, magnitudes: Magnitudes, dtype: torch.dtype) -> Tensor:
    del dtype
    scales = _over_blocks(_positive(magnitudes.of_blocks / _E4M3_LARGEST))
    return _nearest_e4m3(blocks / scales) * scales


def _round_e4m3_of_tensor(blocks: Tensor, magnitudes: Magnitudes, dtype: torch.dtype) -> Tensor:
    del dtype
    scale = _positive(magnitudes.of_tensor / _E4M3_LARGEST)
    return _nearest_e4m3(blocks / scale) * scale


def _round_int8(blocks: Tensor, magnitudes: Magnitudes, dtype: torch.dtype) -> Tensor:
    del dtype
    scales = _over_blocks(_positive(magnitudes.of_blocks / _INT8_LARGEST))
    return (blocks / scales).round().clamp(-128, 127) * scales


def _round_int4(blocks: Tensor, magnitudes: Magnitudes, dtype: torch.dtype) -> Tensor:
    # codes are -8 to 7: with a limit of 7.5, both ends are rounded by half a step
    needed = _positive(magnitudes.of_blocks / 7.5)
    scales = _over_blocks(_in_stored_dtype(needed, dtype))
    return (blocks / scales).round().clamp(-8, 7) * scales


def _round_int4_with_zeros(blocks: Tensor, magnitudes: Magnitudes, dtype: torch.dtype) -> Tensor:
    """Round to codes from 0 to 15 that have the range of each group, 0 included."""
    del magnitudes
    low = blocks.amin(dim=(1, 3)).clamp(max=0)
    high = blocks.amax(dim=(1, 3)).clamp(min=0)
    scales = _in_stored_dtype(_positive((high - low) / 15), dtype)
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (blocks / _over_blocks(_positive(scales)) + _over_blocks(zeros)).round().clamp(0, 15)
    return (codes - _over_blocks(zeros)) * _over_blocks(scales)


def _in_stored_dtype(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales as integers of 4 bits have them: in the dtype of the model, or in bf16."""
    return scales.to(dtype if dtype.itemsize == 2 else torch.bfloat16).float()


def _round_nvfp4(blocks: Tensor, magnitudes: Magnitudes, dtype: torch.dtype) -> Tensor:
    """Round to E2M1 with scales in E4M3, which are divided by one number for the full matrix."""
    del dtype
    largest_scale = magnitudes.of_tensor / _E2M1_LARGEST / _E4M3_LARGEST
    divisor = _positive(largest_scale).reciprocal()
    needed = magnitudes.of_blocks / _E2M1_LARGEST
    scales = _positive(_nearest_e4m3(needed * divisor) / divisor)
    return _nearest_e2m1(blocks / _over_blocks(scales)) * _over_blocks(scales)


def _round_by_powers(
    nearest: Callable[[Tensor], Tensor], largest: float
) -> Callable[[Tensor, Magnitudes, torch.dtype], Tensor]:
    """Return the rounding of OCP Microscaling formats, whose scales are powers of two.

    With the smaller of two powers the largest numbers of a block may be cut off, with the larger one all numbers are
    coarser. The one that loses less is taken.
    """

    def round_blocks(blocks: Tensor, magnitudes: Magnitudes, dtype: torch.dtype) -> Tensor:
        del dtype
        sizes = torch.where(magnitudes.of_blocks > 0, magnitudes.of_blocks, largest)
        exponents = (sizes / largest).log2().floor()
        exponents = exponents.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT - 1)
        candidates: list[Tensor] = []
        losses: list[Tensor] = []
        for more in (0, 1):
            scales = _over_blocks(torch.exp2(exponents + more))
            rounded = nearest(blocks / scales) * scales
            candidates.append(rounded)
            losses.append((rounded.abs() - blocks.abs()).square().sum(dim=(1, 3)))
        takes_larger = _over_blocks(losses[1] < losses[0])
        return torch.where(takes_larger, candidates[1], candidates[0])

    return round_blocks


def _int8_activations(numbers: Tensor, largest: Tensor) -> Tensor:
    scales = _positive(largest / _INT8_LARGEST)
    return (numbers / scales).round().clamp(-128, 127) * scales


def _e4m3_activations(numbers: Tensor, largest: Tensor) -> Tensor:
    scales = _positive(largest / _E4M3_LARGEST)
    return _nearest_e4m3(numbers / scales) * scales


ROUNDINGS: dict[str, Rounding] = {
    "fp8-block": Rounding("block", 128, True, _round_scaled_e4m3, _e4m3_activations),
    "fp8-tensor": Rounding(
        "tensor", None, False, _round_e4m3_of_tensor, _e4m3_activations, has_tensor_scale=True
    ),
    "int8": Rounding("row", None, False, _round_int8, _int8_activations),
    "mxfp8": Rounding("group", 32, False, _round_by_powers(_nearest_e4m3, _E4M3_LARGEST)),
    "mxfp4": Rounding("group", 32, False, _round_by_powers(_nearest_e2m1, _E2M1_LARGEST)),
    "nvfp4": Rounding("group", 16, False, _round_nvfp4, has_tensor_scale=True),
    "int4": Rounding("group", 128, True, _round_int4),
    "int4-awq": Rounding("group", 128, True, _round_int4_with_zeros),
}
"""The formats by the names of ``export --quantize``."""
