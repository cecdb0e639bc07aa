# SPDX-License-Identifier: Apache-2.0
"""Tensors that are stored as codes of a few bits with scales: how to read a part of one, and how to make one.

Every published format is the same computation: ``(code - zero) * scale``, with one zero and one scale for a block of
rows and columns. Formats differ in what a code stands for (``table``), in how codes lie in bytes, and in the blocks. A
scale may itself be stored as codes with a scale.

Only the bytes of the requested part are read, and temporary tensors take about a megabyte, so a rank that needs a tenth
of a tensor does a tenth of the work.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry
from megatron.bridge.utils.errors import UserError

Index = Sequence[int | slice]
Stored = Mapping[str, Tensor]  # stored tensors by name

_BYTES = torch.arange(256, dtype=torch.uint8)
_E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_AT_ONCE = 1 << 17  # numbers unpacked at a time: half a megabyte, which fits into the CPU cache
_ENCODED_AT_ONCE = 1 << 20  # numbers packed at a time
_WORDS_OF_ROWS = 32  # rows that fill words of any format
_E8M0_BIAS = 127


def table_of(values: Sequence[float] | Tensor, high_first: bool = False) -> Tensor:
    """Return the numbers that each byte stands for, [256, numbers of a byte].

    Args:
        values: the number of each code; 256, 16, 4 or 2 of them.
        high_first: whether the highest bits of a byte are its first code.
    """
    numbers = torch.as_tensor(values, dtype=torch.float32)
    bits = len(numbers).bit_length() - 1
    shifts = list(range(0, 8, bits))
    if high_first:
        shifts.reverse()
    codes = [(_BYTES.int() >> shift) & (len(numbers) - 1) for shift in shifts]
    return torch.stack([numbers[code] for code in codes], dim=-1)


# a table is twice as fast as torch's conversion of float8
E4M3 = table_of(_BYTES.view(torch.float8_e4m3fn).float())
INT8 = table_of(_BYTES.view(torch.int8).float())
# sign in the highest bit (OCP Microscaling Formats 1.0, section 5.3.3)
E2M1 = table_of([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)])
# a byte is the exponent of a power of two, 255 is NaN (section 5.4.1)
E8M0 = table_of(
    torch.exp2(_BYTES.double() - _E8M0_BIAS).float().index_fill(0, torch.tensor([255]), math.nan)
)


@cache
def unsigned(bits: int, offset: int = 0) -> Tensor:
    """Return the table of unsigned integers of ``bits`` bits, from which ``offset`` is subtracted."""
    return table_of([float(code - offset) for code in range(1 << bits)])


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of numbers, or a stack of matrices, in one stored tensor."""

    entry: TensorEntry
    shape: tuple[int, int]  # rows and columns of numbers
    table: Tensor | None = field(default=None, compare=False)
    """Numbers of each byte, [256, numbers of a byte]; None for a tensor of numbers."""
    order: tuple[int, ...] | None = None  # in a group of as many columns, the position of each one
    words_in: Literal["rows", "columns"] = "columns"  # what the codes of a word are neighbors in
    powers: bool = False  # whether all numbers are powers of two, in any dtype
    stacked: bool = False  # whether the first dimension of the stored tensor counts matrices

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        return (self.entry,)

    def read(self, stored: Stored, matrix: int | None, rows: range, columns: range) -> Tensor:
        """Return some rows and columns in float32.

        Args:
            stored: the stored tensors by name.
            matrix: index in a stack; None if there is no stack.
            rows: which rows.
            columns: which columns.
        """
        tensor = stored[self.entry.name]
        if matrix is not None:
            tensor = tensor[matrix]
        if self.words_in == "rows":
            words = tensor.reshape(-1, self.shape[1])[:, _slice_of(columns)]
            return self._unpack(words.t(), rows).t()
        words = tensor.reshape(self.shape[0], -1)
        return self._unpack(words[_slice_of(rows)], columns)

    def _unpack(self, words: Tensor, positions: range) -> Tensor:
        """Return the numbers at ``positions`` of each row of ``words``."""
        if self.table is None:
            return words[:, _slice_of(positions)].float()
        if not positions or not len(words):
            return torch.empty(len(words), len(positions))
        in_word = self.table.shape[1] * words.itemsize
        if in_word == 1:
            return _look_up(self.table[:, 0], words[:, _slice_of(positions)].view(torch.uint8))
        unit = math.lcm(in_word, len(self.order or (0,)))
        first = positions.start // unit * unit
        stop = -(-(positions[-1] + 1) // unit) * unit
        part = words[:, first // in_word : stop // in_word]
        if part.stride(-1) != 1:
            part = part.clone(memory_format=torch.contiguous_format)
        numbers = _look_up(self.table, part.view(torch.uint8)).flatten(-2)
        if self.order is not None:
            groups = numbers.unflatten(-1, (-1, len(self.order)))
            numbers = groups[..., list(self.order)].flatten(-2)
        return numbers[:, positions.start - first : positions[-1] + 1 - first : positions.step]

    def encode(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return the stored tensor for ``numbers`` [rows, columns], rounded to the nearest ones that it can hold."""
        return self.store([self.words_of(numbers)])

    def words_of(self, numbers: Tensor) -> Tensor:
        """Return the stored elements for some full rows; these must fill words, if words are along rows."""
        if self.table is None:
            return numbers.to(self.entry.dtype)
        codes = nearest_codes(numbers, self.table)
        return self._pack(codes.t()).t() if self.words_in == "rows" else self._pack(codes)

    def store(self, words: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the stored tensor by name, given the elements of all rows in order."""
        shape = self.entry.shape[1:] if self.stacked else self.entry.shape
        return {self.entry.name: torch.cat(list(words)).reshape(shape)}

    def _pack(self, codes: Tensor) -> Tensor:
        """Return the words of [rows, numbers] codes; the last word is filled with zeros."""
        assert self.table is not None
        in_byte = self.table.shape[1]
        unit = math.lcm(in_byte * self.entry.dtype.itemsize, len(self.order or (0,)))
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % unit))
        if self.order is not None:
            groups = codes.unflatten(-1, (-1, len(self.order)))
            codes = groups[..., torch.tensor(self.order).argsort()].flatten(-2)
        bits = 8 // in_byte
        packed = torch.zeros(len(codes), codes.shape[1] // in_byte, dtype=torch.uint8)
        for position in range(in_byte):
            packed |= codes[:, position::in_byte] << (bits * position)
        return packed.view(self.entry.dtype)

    def largest(self) -> float:
        """Return the largest number that a code stands for."""
        assert self.table is not None
        return float(self.table[:, 0].nan_to_num(nan=0.0).max())


@dataclass(frozen=True)
class _Ones(StoredMatrix):
    """A matrix of ones, in the place of codes or scales."""

    def read(self, stored: Stored, matrix: int | None, rows: range, columns: range) -> Tensor:
        del stored, matrix
        return torch.ones(len(rows), len(columns))


@dataclass(frozen=True)
class _Blocks:
    """The blocks in which some rows or columns are."""

    read: range  # the blocks
    length: int  # rows or columns in each of ``read``, which follow each other; 0 if ``of_index`` says it
    of_index: Tensor | None = None  # the position in ``read`` of each row's or column's block

    @classmethod
    def of_neighbors(cls, indices: range, length: int, count: int) -> "_Blocks":
        """Return the blocks of ``indices`` where ``length`` neighbors are in one of ``count`` blocks."""
        first = indices[0] // length if count > 1 else 0
        last = indices[-1] // length if count > 1 else 0
        if first == last:
            return cls(range(first, first + 1), len(indices))
        if length == 1:
            return cls(indices, 1)
        if indices.step == 1 and indices.start % length == indices.stop % length == 0:
            return cls(range(first, last + 1), length)
        return cls.of_each(torch.tensor(indices).div(length, rounding_mode="floor"))

    @classmethod
    def of_each(cls, blocks: Tensor) -> "_Blocks":
        """Return the given block of each row or column."""
        first, last = (int(end) for end in blocks.aminmax())
        return cls(range(first, last + 1), 0, blocks - first)

    def and_columns(
        self,
        grid: "StoredMatrix | ScaledNumbers",
        columns: "_Blocks",
        stored: Stored,
        matrix: int | None,
    ) -> Tensor:
        """Return the numbers of ``grid`` for these blocks of rows and those of columns."""
        return grid.read(stored, matrix, self.read, columns.read)


def _per_block(
    numbers: Tensor,
    values: Tensor,
    rows: _Blocks,
    columns: _Blocks,
    operation: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Combine ``numbers`` in place with the value of each one's block.

    Args:
        numbers: [rows, columns].
        values: [blocks of rows, blocks of columns].
        rows: the blocks of the rows.
        columns: the blocks of the columns.
        operation: works in place and broadcasts.
    """
    for axis, blocks in enumerate((rows, columns)):
        if blocks.of_index is not None:
            values = values.index_select(axis, blocks.of_index)
    height = rows.length or 1
    width = columns.length or 1
    operation(
        numbers.unflatten(1, (-1, width)).unflatten(0, (-1, height)), values[:, None, :, None]
    )


@dataclass(frozen=True)
class ScaledNumbers:
    """Numbers ``(code - zero) * scale`` with a scale for each block of rows and columns."""

    numbers: StoredMatrix
    scale: "StoredMatrix | ScaledNumbers"  # a number for each block; a single one counts for all
    block: tuple[int, int]  # rows and columns that share a scale
    zero: StoredMatrix | None = None  # what is subtracted from the codes, a number for each block
    zero_offset: float = 0.0  # what is added to these zeros
    groups: TensorEntry | None = None  # the block of each row or column, instead of neighbors
    groups_of: Literal["rows", "columns"] = "rows"
    divides: bool = False  # whether numbers are divided by the scale
    factor: float = 1.0  # by which all numbers are multiplied at last
    offset: float = 0.0  # what is added at last
    others: tuple[TensorEntry, ...] = ()  # stored tensors that describe this one

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that it consists of."""
        return (
            *self.numbers.sources,
            *self.scale.sources,
            *(self.zero.sources if self.zero else ()),
            *((self.groups,) if self.groups else ()),
            *self.others,
        )

    def read(self, stored: Stored, matrix: int | None, rows: range, columns: range) -> Tensor:
        """Return some rows and columns in float32; see ``StoredMatrix.read``."""
        numbers = self.numbers.read(stored, matrix, rows, columns)
        if not numbers.numel():
            return numbers
        row_blocks = self._blocks_of(stored, "rows", rows)
        column_blocks = self._blocks_of(stored, "columns", columns)
        if self.zero is not None:
            zeros = row_blocks.and_columns(self.zero, column_blocks, stored, matrix)
            _per_block(numbers, zeros + self.zero_offset, row_blocks, column_blocks, Tensor.sub_)
        scales = row_blocks.and_columns(self.scale, column_blocks, stored, matrix)
        if not scales.isfinite().all():
            entry = self.scale.sources[0]
            raise UserError(
                f"tensor {entry.name} in {entry.file.name} has a scale that is NaN or infinite: download the "
                "checkpoint again"
            )
        scaled = Tensor.div_ if self.divides else Tensor.mul_
        _per_block(numbers, scales, row_blocks, column_blocks, scaled)
        if self.factor != 1.0:
            numbers.mul_(self.factor)
        return numbers.add_(self.offset) if self.offset else numbers

    def _blocks_of(
        self, stored: Stored, direction: Literal["rows", "columns"], indices: range
    ) -> "_Blocks":
        """Return the blocks in which some rows or columns are."""
        axis = 0 if direction == "rows" else 1
        if self.groups is not None and self.groups_of == direction:
            group_of = stored[self.groups.name][_slice_of(indices)].long()
            count = self.scale.shape[axis]
            if int(group_of.min()) < 0 or int(group_of.max()) >= count:
                raise UserError(
                    f"tensor {self.groups.name} in {self.groups.file.name} has groups outside 0 to {count - 1}, for "
                    "which there are scales: download the checkpoint again"
                )
            return _Blocks.of_each(group_of)
        return _Blocks.of_neighbors(indices, self.block[axis], self.scale.shape[axis])

    def encode(
        self, numbers: Tensor, largest: Tensor | None = None, stored: Stored = MappingProxyType({})
    ) -> dict[str, Tensor]:
        """Return the stored tensors whose numbers are nearest to ``numbers``.

        Args:
            numbers: [rows, columns] in float32.
            largest: largest magnitude of all tensors that share a scale, where one scale is for a full tensor; None
                takes that of ``numbers``.
            stored: has the group of each row or column, where that is stored.
        """
        parts = (
            self._encode_scales(numbers, stored, largest)
            if self.zero is None
            else self._encode_zeros(numbers, stored)
        )
        return parts | self.encode_codes({**stored, **parts}, None, numbers)

    def encode_codes(
        self, stored: Stored, matrix: int | None, numbers: Tensor
    ) -> dict[str, Tensor]:
        """Return the stored codes that are nearest to ``numbers`` with the scales and zeros in ``stored``.

        Args:
            stored: the stored scales and zeros by name.
            matrix: index in a stack; None if there is no stack.
            numbers: [rows, columns], in any floating-point dtype.
        """
        words: list[Tensor] = []
        column_blocks = self._blocks_of(stored, "columns", range(numbers.shape[1]))
        for rows in _row_ranges(numbers, _WORDS_OF_ROWS):
            row_blocks = self._blocks_of(stored, "rows", rows)
            scales = row_blocks.and_columns(self.scale, column_blocks, stored, matrix)
            scales = torch.where(scales > 0, scales, 1.0) * self.factor
            codes = numbers[_slice_of(rows)].to(torch.float32, copy=True)
            scaled = Tensor.mul_ if self.divides else Tensor.div_
            _per_block(codes, scales, row_blocks, column_blocks, scaled)
            if self.zero is not None:
                zeros = row_blocks.and_columns(self.zero, column_blocks, stored, matrix)
                zeros = zeros + self.zero_offset
                _per_block(codes, zeros, row_blocks, column_blocks, Tensor.add_)
            words.append(self.numbers.words_of(codes))
        return self.numbers.store(words)

    def _in_blocks(self, numbers: Tensor, stored: Stored) -> Iterator[Tensor]:
        """Yield [block rows, height, block columns, width] for some rows; the edges are filled with zeros."""
        height, width = self.block
        order: Tensor | None = None
        if self.groups is not None:
            group_of = stored[self.groups.name].long()
            if group_of.bincount().unique().numel() != 1:
                raise UserError(
                    f"tensor {self.groups.name} has groups of different lengths, which cannot be quantized anew: "
                    "export without quantize='source'"
                )
            order = group_of.argsort(stable=True)
        for rows in _row_ranges(numbers, height):
            if order is not None and self.groups_of == "rows":
                part = numbers.index_select(0, order[_slice_of(rows)]).float()
            else:
                part = numbers[_slice_of(rows)].float()
            if order is not None and self.groups_of == "columns":
                part = part.index_select(1, order)
            padding = (0, -part.shape[1] % width, 0, -part.shape[0] % height)
            padded = torch.nn.functional.pad(part, padding) if any(padding) else part
            yield padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))

    def _encode_scales(
        self, numbers: Tensor, stored: Stored, largest: Tensor | None
    ) -> dict[str, Tensor]:
        limit = self._limit() * self.factor
        is_power = isinstance(self.scale, StoredMatrix) and is_power_of_two(self.scale)
        of_rows: list[Tensor] = []
        for blocks in self._in_blocks(numbers, stored):
            magnitudes = blocks.abs().amax(dim=(1, 3))
            of_rows.append(
                _nearest_powers(blocks, magnitudes, self.numbers)
                if is_power
                else magnitudes / limit
            )
        needed = torch.cat(of_rows)
        if largest is not None and needed.numel() == 1:
            needed = (largest / limit).reshape(1, 1).to(needed)
        if isinstance(self.scale, ScaledNumbers):
            return self.scale.encode(needed, None if largest is None else largest / limit)
        needed = torch.where(needed > 0, needed, 1.0)
        return self.scale.encode(needed.reciprocal() if self.divides else needed)

    def _limit(self) -> float:
        """Return the magnitude, in codes, that the largest number of a block gets."""
        largest = self.numbers.largest()
        table = self.numbers.table
        is_packed_integer = table is not None and table is not INT8 and bool((table % 1 == 0).all())
        # of [-8, 7]: with 7.5, both ends are rounded by half a step
        return largest + 0.5 if is_packed_integer else largest

    def _encode_zeros(self, numbers: Tensor, stored: Stored) -> dict[str, Tensor]:
        """Return scales and zeros with which the codes have the range of each block, 0 included."""
        assert self.zero is not None
        assert self.numbers.table is not None
        assert isinstance(self.scale, StoredMatrix)
        lowest_code = float(self.numbers.table.min())
        highest_code = float(self.numbers.table.max())
        of_rows: list[tuple[Tensor, Tensor]] = []
        for blocks in self._in_blocks(numbers, stored):
            low = blocks.amin(dim=(1, 3)).clamp(max=0)
            of_rows.append((low, blocks.amax(dim=(1, 3)).clamp(min=0)))
        low = torch.cat([part for part, _ in of_rows])
        high = torch.cat([part for _, part in of_rows])
        needed = (high - low) / (highest_code - lowest_code)
        parts = self.scale.encode(torch.where(needed > 0, needed, 1.0))
        scales = self.scale.read(parts, None, *map(range, self.scale.shape))
        zeros = (lowest_code - low / scales).round()
        zeros = zeros.clamp(lowest_code + self.zero_offset, highest_code)
        return parts | self.zero.encode(zeros - self.zero_offset)


@dataclass(frozen=True)
class QuantizedTensor:
    """One tensor of a model that is stored as several."""

    parts: ScaledNumbers
    shape: tuple[int, ...]  # as it appears; more than two dimensions are a stack of matrices
    transposed: bool = False  # whether the stored matrices are its transpose
    flat: bool = False  # whether the stored numbers are one row, cut anywhere

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that it consists of; the first one has its values."""
        return self.parts.sources

    def fill(self, stored: Stored, index: Index, target: Tensor) -> None:
        """Compute ``tensor[index]`` in float32 and copy it into ``target``.

        Args:
            stored: the stored tensors by name.
            index: integers or slices for leading dimensions, slices for rows and columns.
            target: of the part's shape, in any dtype.
        """
        full_index = [*index, *[slice(None)] * (len(self.shape) - len(index))]
        if len(self.shape) == 2:
            self._fill_matrix(stored, None, full_index, target)
            return
        which, *inner = full_index
        if isinstance(which, int):
            self._fill_matrix(stored, which, inner, target)
            return
        for matrix, part in zip(range(self.shape[0])[which], target, strict=True):
            self._fill_matrix(stored, matrix, inner, part)

    def _fill_matrix(
        self, stored: Stored, matrix: int | None, index: Index, target: Tensor
    ) -> None:
        rows, columns = map(_range_of, self.shape[-2:], index)
        if self.flat:
            self._fill_flat(stored, rows, columns, target)
            return
        if self.transposed:
            rows, columns, target = columns, rows, target.t()
        at_once = max(1, _AT_ONCE // max(1, len(columns)))
        for here, there in _spans(rows, self.parts.block[0], at_once):
            target[there].copy_(self.parts.read(stored, matrix, here, columns))

    def _fill_flat(self, stored: Stored, rows: range, columns: range, target: Tensor) -> None:
        width = self.shape[-1]
        at_once = max(1, _AT_ONCE // max(1, width))
        for start in range(0, len(rows), at_once):
            here = rows[start : start + at_once]
            part = range(here[0] * width, (here[-1] + 1) * width)
            numbers = self.parts.read(stored, None, range(1), part).reshape(-1, width)
            target[start : start + at_once].copy_(numbers[:: here.step, _slice_of(columns)])

    def as_product(self) -> "tuple[QuantizedTensor, QuantizedTensor] | None":
        """Return the numbers of the codes, and the scale of each one, as tensors of this shape.

        Returns:
            None if a number is not exactly a code's number times a scale.
        """
        parts = self.parts
        if parts.divides or parts.zero is not None or parts.factor != 1.0 or parts.offset:
            return None
        scale_of_one = _Ones(parts.numbers.entry, (1, 1))
        numbers = _Ones(parts.numbers.entry, parts.shape)
        return (
            replace(self, parts=replace(parts, scale=scale_of_one, groups=None)),
            replace(self, parts=replace(parts, numbers=numbers)),
        )

    def encode(
        self,
        full_tensor: Tensor,
        largest: Tensor | None = None,
        stored: Stored = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Return the stored tensors, by name, whose numbers are nearest to ``full_tensor``.

        Args:
            full_tensor: of ``shape``; of a stack, one matrix.
            largest: see ``ScaledNumbers.encode``.
            stored: see ``ScaledNumbers.encode``.
        """
        if self.flat:
            raise UserError(
                f"tensor {self.sources[0].name} is stored in 4 bits of bitsandbytes, in which trained values are not "
                "written: export in full, or name another format"
            )
        return self.parts.encode(self._as_stored(full_tensor), largest, stored)

    def has_nearest_codes(self, stored: Stored, full_tensor: Tensor) -> bool:
        """Return whether the stored codes are nearest to ``full_tensor``, given the stored scales."""
        if self.flat:
            return False
        matrices = full_tensor if len(self.shape) > 2 else full_tensor[None]
        for index, one in enumerate(matrices):
            matrix = index if len(self.shape) > 2 else None
            for name, codes in self.parts.encode_codes(
                stored, matrix, self._as_stored(one)
            ).items():
                actual = stored[name] if matrix is None else stored[name][matrix]
                if not torch.equal(actual.contiguous().view(torch.uint8), codes.view(torch.uint8)):
                    return False
        return True

    def _as_stored(self, matrix: Tensor) -> Tensor:
        numbers = matrix.detach().cpu()
        return numbers.t() if self.transposed else numbers


def is_power_of_two(scale: StoredMatrix) -> bool:
    """Whether a scale can only be a power of two."""
    return scale.powers or scale.table is E8M0 or scale.entry.dtype is torch.float8_e8m0fnu


def nearest_codes(numbers: Tensor, table: Tensor) -> Tensor:
    """Return the code of the number nearest to each of ``numbers``; halfway, the even code.

    Args:
        numbers: of any shape.
        table: see ``table_of``, with the lowest bits of a byte first.
    """
    if table is E4M3:
        return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    bits = 8 // table.shape[1]
    values = table[: 1 << bits, 0]
    if table is E8M0:
        exponents = numbers.clamp(2.0**-_E8M0_BIAS, 2.0**_E8M0_BIAS).log2().round()
        return (exponents + _E8M0_BIAS).to(torch.uint8)
    if torch.equal(values, values.round()):
        codes = numbers.round().clamp(float(values.min()), float(values.max()))
        if table is INT8:
            return codes.to(torch.int8).view(torch.uint8)
        return (codes - values[0]).to(torch.uint8)
    return _nearest_e2m1(numbers)


def _nearest_e2m1(numbers: Tensor) -> Tensor:
    """Return the codes of the nearest numbers of E2M1: steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6."""
    magnitude = numbers.abs()
    code = (magnitude * 2).round_()
    code = torch.minimum(code, magnitude.round().add_(2))
    code = torch.minimum(code, magnitude.mul_(0.5).round_().add_(4)).clamp_(max=7)
    return code.to(torch.uint8).add_(numbers.signbit().to(torch.uint8), alpha=8)


def _rounded_magnitudes(magnitudes: Tensor, table: Tensor) -> Tensor:
    """Return the numbers of ``table`` nearest to ``magnitudes``."""
    if table is E4M3:
        return magnitudes.clamp(max=448).to(torch.float8_e4m3fn).float()
    coarse = (magnitudes * 0.5).round_().mul_(2).clamp_(max=6)
    fine = torch.where(magnitudes < 4, magnitudes.round(), coarse)
    return torch.where(magnitudes < 2, (magnitudes * 2).round_().mul_(0.5), fine)


def _nearest_powers(blocks: Tensor, magnitudes: Tensor, numbers: StoredMatrix) -> Tensor:
    """Return the powers of two with which blocks lose the least.

    With the smaller of two powers the largest numbers of a block may be cut off, with the larger one all numbers are
    coarser.

    Args:
        blocks: [block rows, height, block columns, width].
        magnitudes: the largest magnitude of each block.
        numbers: what holds the codes.
    """
    assert numbers.table is not None
    largest = numbers.largest()
    positive = torch.where(magnitudes > 0, magnitudes, largest)
    exponents = (positive / largest).log2().floor()
    exponents = exponents.clamp(-_E8M0_BIAS, _E8M0_BIAS - 1)
    sizes = blocks.abs()
    losses: list[Tensor] = []
    for more in (0, 1):
        scale = torch.exp2(exponents + more)[:, None, :, None]
        rounded = _rounded_magnitudes(sizes / scale, numbers.table).mul_(scale)
        losses.append(rounded.sub_(sizes).square_().sum(dim=(1, 3)))
    return torch.exp2(exponents + (losses[1] < losses[0]))


def _look_up(table: Tensor, stored: Tensor) -> Tensor:
    """The entries of ``table`` for the bytes in ``stored``, in its shape."""
    return table.index_select(0, stored.reshape(-1).int()).view(*stored.shape, *table.shape[1:])


def block_grid(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """The shape of a matrix's scales; blocks at its edges may be smaller."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def _range_of(size: int, part: int | slice) -> range:
    """The indices of a slice of ``size`` rows or columns."""
    assert isinstance(part, slice), "rows and columns are indexed by slices"
    return range(size)[part]


def _row_ranges(numbers: Tensor, unit: int) -> Iterator[range]:
    """Yield the rows of a matrix, about a million numbers at a time in multiples of ``unit`` rows."""
    at_once = max(1, _ENCODED_AT_ONCE // max(1, numbers.shape[1] * unit)) * unit
    for start in range(0, numbers.shape[0], at_once):
        yield range(start, min(start + at_once, numbers.shape[0]))


def _slice_of(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)


def _spans(indices: range, length: int, limit: int) -> Iterator[tuple[range, slice]]:
    """Yield (indices, their positions) for up to ``limit`` of ``indices`` at a time.

    Where ``length`` is large, the indices are of one block of that length, so that they share their scales.
    """
    at = 0
    while at < len(indices):
        count = limit
        if length > 1:
            block = indices[at] // length
            count = min(limit, -(-((block + 1) * length - indices[at]) // indices.step))
        here = indices[at : at + count]
        yield here, slice(at, at + len(here))
        at += len(here)
