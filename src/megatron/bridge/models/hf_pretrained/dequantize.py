# SPDX-License-Identifier: Apache-2.0
"""Numbers stored in 8 or 4 bits with a scale for each block, and any part of them in full.

Only the bytes of the part that is asked for are read, and what is computed on the way is less than a megabyte, so
a rank that needs a tenth of a tensor does a tenth of the work.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry

Index = Sequence[int | slice]

_BYTES = torch.arange(256, dtype=torch.uint8)
# numbers by byte: torch converts float8 at half the speed of a look-up
_E4M3 = _BYTES.view(torch.float8_e4m3fn).float()
# the values of E2M1, sign in the highest bit (OCP Microscaling Formats 1.0, section 5.3.3)
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_E2M1_PAIRS = torch.stack((_E2M1[(_BYTES & 0xF).int()], _E2M1[(_BYTES >> 4).int()]), dim=-1)
_MX_BLOCK = 32  # numbers that share a scale
_MX_BYTES = _MX_BLOCK // 2
_E8M0_BIAS = 127
_AT_ONCE = 1 << 17  # numbers unpacked at a time: half a megabyte, which stays in a cache


@dataclass(frozen=True)
class BlockScaledFP8:
    """A matrix of 8-bit floats; each block of ``block`` rows and columns is multiplied by its scale."""

    weight: TensorEntry  # [rows, columns] in float8
    # [ceil(rows / block rows), ceil(columns / block columns)]; any shape of one number for the whole
    scale: TensorEntry
    block: tuple[int, int] | None  # rows and columns that share a scale; None for one scale

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that it is made of."""
        return self.weight, self.scale

    def fill(self, stored: Mapping[str, Tensor], index: Index, target: Tensor) -> None:
        """Compute ``tensor[index]`` in float32 and copy it into ``target``.

        Row of blocks by row of blocks: the scales of one are a vector over its columns.

        Args:
            stored: the stored tensors by name.
            index: integers for leading dimensions, slices for the others.
            target: of the part's shape, in any dtype.
        """
        height, width = self.block or self.shape
        rows, columns = map(_range, self.shape, _full(index, 2))
        scale = stored[self.scale.name].float().reshape(-(-self.shape[0] // height), -1)
        weight = stored[self.weight.name][:, _slice(columns)]
        of_column = torch.arange(columns.start, columns.stop, columns.step).div(width, rounding_mode="floor")
        at_once = max(1, _AT_ONCE // max(1, len(columns)))
        for number, here, there in _spans(rows, height, at_once):
            factors = scale[number, of_column] if scale.numel() > 1 else scale[0]
            target[there].copy_(_look_up(_E4M3, weight[here].view(torch.uint8)).mul_(factors))


@dataclass(frozen=True)
class MXFP4:
    """Matrices of 4-bit floats, stored transposed; 32 neighbors share a power of two (MXFP4)."""

    blocks: TensorEntry
    """[matrices, columns, groups, 16] bytes; the low half of a byte is the first of its two numbers."""
    scales: TensorEntry
    """[matrices, columns, groups] exponents in E8M0."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[matrices, 32 x groups, columns]."""
        matrices, columns, groups, _ = self.blocks.shape
        return matrices, groups * _MX_BLOCK, columns

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        return self.blocks, self.scales

    def fill(self, stored: Mapping[str, Tensor], index: Index, target: Tensor) -> None:
        """The same, matrix by matrix, some columns at a time."""
        which, *inner = _full(index, 3)
        if isinstance(which, slice):
            for number, part in zip(range(self.shape[0])[which], target, strict=True):
                self.fill(stored, (number, *inner), part)
            return
        rows, columns = map(_range, self.shape[1:], inner)
        groups = slice(rows.start // _MX_BLOCK, -(-rows.stop // _MX_BLOCK))
        skip = groups.start * _MX_BLOCK
        blocks, scales = (stored[entry.name][which, _slice(columns), groups] for entry in self.sources)
        step = max(1, _AT_ONCE // max(1, blocks[:1].numel() * 2))
        for start in range(0, len(columns), step):
            part = _unpacked(blocks[start : start + step], scales[start : start + step])
            target[:, start : start + step].copy_(part[:, rows.start - skip : rows.stop - skip : rows.step].t())


QuantizedTensor = BlockScaledFP8 | MXFP4
"""One tensor that is stored as several."""


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """[columns, 32 x groups] from [columns, groups, 16] bytes and [columns, groups] exponents."""
    numbers = _look_up(_E2M1_PAIRS, blocks).flatten(-2)
    return numbers.mul_(torch.exp2(scales.float() - _E8M0_BIAS).unsqueeze(-1)).flatten(-2)


def _look_up(table: Tensor, stored: Tensor) -> Tensor:
    """What ``table`` has for each byte of ``stored``, in its shape."""
    return table.index_select(0, stored.reshape(-1).int()).view(*stored.shape, *table.shape[1:])


def block_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a matrix; blocks at its edges may be smaller."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def is_mxfp4(blocks: TensorEntry, scales: TensorEntry) -> bool:
    """Whether two stored tensors are the two parts of MXFP4 matrices."""
    right_bytes = blocks.dtype is scales.dtype is torch.uint8
    return right_bytes and len(blocks.shape) == 4 and blocks.shape == (*scales.shape, _MX_BYTES)


def _full(index: Index, dimensions: int) -> list[int | slice]:
    return [*index, *[slice(None)] * (dimensions - len(index))]


def _range(size: int, part: int | slice) -> range:
    """Which of ``size`` rows or columns a slice means."""
    assert isinstance(part, slice), "rows and columns are indexed by slices"
    return range(size)[part]


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)


def _spans(indices: range, length: int, most: int) -> Iterator[tuple[int, slice, slice]]:
    """(block, indices in it, their places among all ``indices``) for up to ``most`` of ``indices`` at a time."""
    at = 0
    while at < len(indices):
        number = indices[at] // length
        count = -(-((number + 1) * length - indices[at]) // indices.step)
        here = indices[at : at + min(count, most)]
        yield number, _slice(here), slice(at, at + len(here))
        at += len(here)
