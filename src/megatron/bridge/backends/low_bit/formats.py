# SPDX-License-Identifier: Apache-2.0
"""The formats of frozen weights in memory: NF4, FP8 and MXFP4.

A row of a matrix is cut into groups of neighbors that share a scale; a number is ``code * scale``. No group crosses a
row, so a part of a matrix that divides into groups has the codes that it has in the full matrix, whatever rows Megatron
joins or cuts. On such matrices NF4 has the codes and scales of bitsandbytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

BasePrecision = Literal["nf4", "fp8", "mxfp4"]

# quantiles of a normal distribution (https://arxiv.org/abs/2305.14314, appendix E)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# sign in the highest bit (OCP Microscaling Formats 1.0, section 5.3.3)
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_E2M1_MAGNITUDES, *(-magnitude for magnitude in _E2M1_MAGNITUDES))
_E4M3_LARGEST = 448.0
_E8M0_BIAS = 127
_SMALLEST_ABSMAX = 1e-38  # as bitsandbytes, so that a group of zeros has a reciprocal
_AT_ONCE = 1 << 22  # numbers of temporary tensors


@dataclass(frozen=True)
class LowBitFormat:
    """How a matrix [rows, columns] is held in codes and scales."""

    name: BasePrecision
    group: int  # neighbors in a row that share a scale
    codes_dtype: torch.dtype
    numbers_of_code: int  # numbers in an element of the codes
    scales_dtype: torch.dtype
    find_scales: Callable[[Tensor], Tensor]
    """[groups, group] in float32 -> the scale of each group"""
    encode: Callable[[Tensor, Tensor], Tensor]
    """(numbers [groups, group], scales [groups]) -> codes, one for each number"""
    decode: Callable[[Tensor], Tensor]
    """codes -> what each of them stands for, in float32"""
    pack_scales: Callable[[Tensor], Tensor]
    unpack_scales: Callable[[Tensor], Tensor]

    @property
    def bits(self) -> float:
        """Bits of a number, its share of a scale included."""
        return (
            8 * self.codes_dtype.itemsize / self.numbers_of_code
            + 8 * self.scales_dtype.itemsize / self.group
        )

    def codes_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // self.numbers_of_code

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // self.group

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of the numbers nearest to ``matrix`` [rows, columns]."""
        codes: list[Tensor] = []
        scales: list[Tensor] = []
        for rows in matrix.split(max(1, _AT_ONCE // matrix.shape[1])):
            groups = rows.float().reshape(-1, self.group)
            group_scales = self.find_scales(groups)
            codes.append(self._stored(self.encode(groups, group_scales), rows.shape))
            scales.append(self.pack_scales(group_scales).view(rows.shape[0], -1))
        return torch.cat(codes), torch.cat(scales)

    def keep(self, numbers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return codes and scales that stand for exactly ``numbers * scales``, or None if this format has none.

        Args:
            numbers: [rows, columns], what the codes of the source stand for, in float32.
            scales: [rows, columns], the scale of each number, in float32.
        """
        of_group = scales.unflatten(1, (-1, self.group))
        first = of_group[..., 0]
        if not torch.equal(of_group, first[..., None].expand_as(of_group)):
            return None
        packed = self.pack_scales(first)
        if not torch.equal(self.unpack_scales(packed), first):
            return None
        ones = torch.ones(first.numel(), device=first.device)
        codes = self.encode(numbers.reshape(-1, self.group), ones)
        if not torch.equal(self.decode(codes).view_as(numbers), numbers):
            return None
        return self._stored(codes, numbers.shape), packed

    def dequantize(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [rows, columns] in ``dtype``: products in float32, rounded once."""
        rows = codes.shape[0]
        matrix = torch.empty(
            rows, codes.shape[1] * self.numbers_of_code, dtype=dtype, device=codes.device
        )
        step = max(1, _AT_ONCE // max(1, matrix.shape[1]))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            numbers = self._numbers(codes[part]).unflatten(1, (-1, self.group))
            numbers.mul_(self.unpack_scales(scales[part])[..., None])
            matrix[part].copy_(numbers.flatten(1))
        return matrix

    def _stored(self, codes: Tensor, shape: torch.Size) -> Tensor:
        codes = codes.view(shape)
        if self.numbers_of_code == 1:
            return codes
        first, second = codes[:, ::2], codes[:, 1::2]
        high, low = (first, second) if self.name == "nf4" else (second, first)
        return high << 4 | low

    def _numbers(self, codes: Tensor) -> Tensor:
        if self.numbers_of_code == 1:
            return self.decode(codes)
        pairs = _pairs_of_byte(self.name, codes.device)
        return pairs.index_select(0, codes.reshape(-1).int()).view(codes.shape[0], -1)


@cache
def _pairs_of_byte(name: str, device: torch.device) -> Tensor:
    """Return the two numbers of each byte, [256, 2]."""
    byte = torch.arange(256)
    high, low = byte >> 4, byte & 15
    values = torch.tensor(_NF4 if name == "nf4" else _E2M1)
    order = (high, low) if name == "nf4" else (low, high)
    return torch.stack([values[codes] for codes in order], dim=-1).to(device)


@cache
def _table(name: str, device: torch.device) -> Tensor:
    return torch.tensor(_NF4 if name == "nf4" else _E2M1, device=device)


def _find_nf4_scales(groups: Tensor) -> Tensor:
    return groups.abs().amax(1)


def _encode_nf4(groups: Tensor, scales: Tensor) -> Tensor:
    scaled = (groups * scales.clamp(min=_SMALLEST_ABSMAX).reciprocal()[:, None]).clamp_(-1, 1)
    table = _table("nf4", groups.device)
    return torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def _decode_nf4(codes: Tensor) -> Tensor:
    return _table("nf4", codes.device)[codes.int()]


def _find_fp8_scales(groups: Tensor) -> Tensor:
    magnitudes = groups.abs().amax(1)
    return torch.where(magnitudes > 0, magnitudes / _E4M3_LARGEST, 1.0)


def _encode_fp8(groups: Tensor, scales: Tensor) -> Tensor:
    scaled = groups / scales[:, None]
    return scaled.clamp_(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn)


def _find_mxfp4_scales(groups: Tensor) -> Tensor:
    """Return the powers of two with which groups lose the least.

    With the smaller of two powers the largest numbers are cut off, with the larger one all numbers are coarser.
    """
    largest = _E2M1_MAGNITUDES[-1]
    magnitudes = groups.abs().amax(1)
    exponents = (torch.where(magnitudes > 0, magnitudes, largest) / largest).log2().floor()
    exponents = exponents.clamp(-_E8M0_BIAS, _E8M0_BIAS - 1)
    losses: list[Tensor] = []
    for more in (0, 1):
        scales = torch.exp2(exponents + more)
        rounded = _decode_mxfp4(_encode_mxfp4(groups, scales)) * scales[:, None]
        losses.append((rounded - groups).square_().sum(1))
    return torch.exp2(exponents + (losses[1] < losses[0]))


def _encode_mxfp4(groups: Tensor, scales: Tensor) -> Tensor:
    """Return the codes of the nearest numbers; halfway, the even code."""
    scaled = groups / scales[:, None]
    magnitudes = _table("mxfp4", groups.device)[:8]
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    sizes = scaled.abs()
    below = torch.bucketize(sizes, middles, out_int32=True)
    above = torch.bucketize(sizes, middles, out_int32=True, right=True)
    codes = torch.where(below % 2 == 0, below, above)
    return (codes + 8 * scaled.signbit()).to(torch.uint8)


def _decode_mxfp4(codes: Tensor) -> Tensor:
    return _table("mxfp4", codes.device)[codes.int()]


def _pack_power(scales: Tensor) -> Tensor:
    exponents = scales.log2().round().clamp(-_E8M0_BIAS, _E8M0_BIAS)
    return (exponents + _E8M0_BIAS).to(torch.uint8)


def _unpack_power(packed: Tensor) -> Tensor:
    # by way of float64, because float32's exp2 is zero for 2^-127 on some processors
    return torch.exp2(packed.double() - _E8M0_BIAS).float()


def _same(scales: Tensor) -> Tensor:
    return scales


NF4 = LowBitFormat(
    "nf4",
    group=64,
    codes_dtype=torch.uint8,
    numbers_of_code=2,
    scales_dtype=torch.float32,
    find_scales=_find_nf4_scales,
    encode=_encode_nf4,
    decode=_decode_nf4,
    pack_scales=_same,
    unpack_scales=_same,
)
FP8 = LowBitFormat(
    "fp8",
    group=64,  # divides the blocks of published models (128), and the widths that these do not, such as 2880
    codes_dtype=torch.float8_e4m3fn,
    numbers_of_code=1,
    scales_dtype=torch.float32,
    find_scales=_find_fp8_scales,
    encode=_encode_fp8,
    decode=Tensor.float,
    pack_scales=_same,
    unpack_scales=_same,
)
MXFP4 = LowBitFormat(
    "mxfp4",
    group=32,
    codes_dtype=torch.uint8,
    numbers_of_code=2,
    scales_dtype=torch.uint8,
    find_scales=_find_mxfp4_scales,
    encode=_encode_mxfp4,
    decode=_decode_mxfp4,
    pack_scales=_pack_power,
    unpack_scales=_unpack_power,
)
FORMATS: dict[str, LowBitFormat] = {row.name: row for row in (NF4, FP8, MXFP4)}
