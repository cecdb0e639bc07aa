# SPDX-License-Identifier: Apache-2.0
"""The formats of quantized weights that are read: which stored tensors are one tensor, and what their numbers mean.

The constants of type ``Format`` at the end declare them. A format names the stored tensor with the codes and the
tensors beside it; its function combines them. Which formats a checkpoint may have follows from its method, in
``quantization_configs``. Whether a module is quantized at all follows from the stored tensors, so modules that a config
excludes need no rule.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.bridge.models.hf_pretrained.quantized_tensors import (
    E2M1,
    E4M3,
    E8M0,
    INT8,
    QuantizedTensor,
    ScaledNumbers,
    StoredMatrix,
    block_grid,
    table_of,
    unsigned,
)
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry, dtype_name
from megatron.bridge.utils import strict_json

Entries = Mapping[str, TensorEntry]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word of AWQ has each of 8 neighbors
_MX_BLOCK = 32
_NV_BLOCK = 16
_INT32_BITS = 32
_BNB_INT8_FACTOR = 7.874015718698502e-3  # 1/127, in the digits of bitsandbytes


class FormatError(Exception):
    """A phrase that says why stored tensors are not what their names promise."""


@dataclass(frozen=True)
class Scheme:
    """What a config declares about the weight of one module, where the stored tensors do not say it."""

    block: tuple[int, int] | None = None  # rows and columns that share a scale
    block_key: str = "weight_block_size"  # the key that declares it
    bits: int | None = None
    is_gptq_v2: bool = False  # zeros are stored as they are, not less 1
    powers: bool = False  # scales are powers of two


@dataclass(frozen=True)
class Group:
    """The stored tensors of one quantized tensor by role, and the scheme of its module."""

    codes: TensorEntry
    parts: Mapping[str, TensorEntry]
    scheme: Scheme
    stored: Mapping[str, Tensor]

    def values(self, role: str) -> Tensor:
        """Return the stored tensor of a small part."""
        return self.stored[self.parts[role].name]


@dataclass(frozen=True)
class Format:
    """How one kind of quantized tensors is stored.

    The name of a part is that of the codes, without the format's ending, and the part's ending.
    """

    codes: str  # ending of the name of the tensor with the codes
    plain: str  # what takes the place of this ending in the plain name
    parts: Mapping[str, tuple[str, ...]]  # role -> endings; the first that exists is taken
    combine: Callable[[Group], QuantizedTensor]
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    dtypes: tuple[torch.dtype, ...] = ()  # of the codes; others are not of this format
    needs: str = ""  # role without which a tensor of these dtypes is of another format

    def endings(self) -> tuple[str, ...]:
        """Return the endings of all parts."""
        return tuple(
            end for ends in (*self.parts.values(), *self.optional.values()) for end in ends
        )


# --- one function for each format ------------------------------------------------------------------------------------


def _combine_scaled(group: Group) -> QuantizedTensor:
    """8-bit floats or integers with a scale for each block, row, or for all."""
    codes = group.codes
    scale_entry = group.parts["scale"]
    if len(codes.shape) not in (2, 3):
        raise FormatError(
            f"tensor {codes.name} is {dtype_name(codes.dtype)} of shape {list(codes.shape)}, not a matrix"
        )
    is_power = scale_entry.dtype is torch.uint8
    if not scale_entry.dtype.is_floating_point and not is_power:
        raise FormatError(
            f"tensor {scale_entry.name} is {dtype_name(scale_entry.dtype)}, not a float"
        )
    shape = (codes.shape[-2], codes.shape[-1])
    block = _block_of_scales(codes, scale_entry, group.scheme)
    stacked = len(codes.shape) == 3
    grid = block_grid(shape, block)
    scale = StoredMatrix(
        scale_entry,
        (grid[0], grid[1]),
        E8M0 if is_power else None,
        powers=group.scheme.powers,
        stacked=stacked,
    )
    table = INT8 if codes.dtype is torch.int8 else E4M3
    zero = None
    if "zero" in group.parts:
        zero_entry = group.parts["zero"]
        _require_shape(zero_entry, scale_entry.shape, scale_entry)
        zero = StoredMatrix(
            zero_entry, (grid[0], grid[1]), INT8 if zero_entry.dtype is torch.int8 else None
        )
    numbers = StoredMatrix(codes, shape, table, stacked=stacked)
    return QuantizedTensor(ScaledNumbers(numbers, scale, block, zero), codes.shape)


def _block_of_scales(codes: TensorEntry, scale: TensorEntry, scheme: Scheme) -> tuple[int, int]:
    """Return the rows and columns that share a scale, from what is declared or else from the shapes."""
    rows, columns = codes.shape[-2:]
    grid = scale.shape
    if len(codes.shape) == 3:
        if grid[:1] != codes.shape[:1]:
            raise FormatError(
                f"tensor {scale.name} has shape {list(grid)}, but {codes.name} of shape {list(codes.shape)} requires "
                f"scales for {codes.shape[0]} matrices"
            )
        grid = grid[1:]
    while len(grid) > 2 and 1 in grid:  # [row blocks, 1, column blocks, 1]
        position = grid.index(1)
        grid = (*grid[:position], *grid[position + 1 :])
    if scheme.block is not None:
        expected = block_grid((rows, columns), scheme.block)
        is_row = scheme.block[0] == 1 and grid == expected[:1]
        if grid == expected or is_row:
            return scheme.block
        requirement = f"shape {list(expected)}"
    elif math.prod(grid) == 1:
        return rows, columns
    elif grid in ((rows, 1), (rows,)):
        return 1, columns
    elif len(grid) == 2 and grid[0] == rows and columns % grid[1] == 0:
        return 1, columns // grid[1]
    else:
        requirement = "one number, or one for each row"
    raise FormatError(
        f"tensor {scale.name} has shape {list(scale.shape)}, but {scheme.block_key}={scheme.block} and the shape "
        f"{list(codes.shape)} of {codes.name} require {requirement}"
    )


def _combine_bnb_int8(group: Group) -> QuantizedTensor:
    """LLM.int8: a scale for each row, of which a code is 127th parts."""
    codes = group.codes
    scale = group.parts["scale"]
    if len(codes.shape) != 2 or scale.shape != codes.shape[:1]:
        raise FormatError(
            f"tensor {scale.name} has shape {list(scale.shape)}, but {codes.name} of shape {list(codes.shape)} "
            "requires one number for each row"
        )
    rows, columns = codes.shape
    others = tuple(entry for role, entry in group.parts.items() if role != "scale")
    parts = ScaledNumbers(
        StoredMatrix(codes, (rows, columns), INT8),
        StoredMatrix(scale, (rows, 1)),
        (1, columns),
        factor=_BNB_INT8_FACTOR,
        others=others,
    )
    return QuantizedTensor(parts, codes.shape)


def _combine_packed_integers(group: Group) -> QuantizedTensor:
    """``pack-quantized`` of compressed-tensors: integers in words of 32 bits along columns."""
    codes = group.codes
    scale = group.parts["scale"]
    shape = tuple(int(size) for size in group.values("shape"))
    if len(codes.shape) != 2 or len(shape) != 2 or codes.shape[0] != shape[0] or min(shape) < 1:
        raise FormatError(
            f"tensor {codes.name} has shape {list(codes.shape)}, which does not hold the shape {list(shape)} that "
            f"{group.parts['shape'].name} declares"
        )
    rows, columns = shape
    bits = group.scheme.bits or _INT32_BITS * codes.shape[1] // columns
    if bits not in (2, 4, 8) or codes.shape[1] != -(-columns * bits // _INT32_BITS):
        raise FormatError(
            f"tensor {codes.name} has {codes.shape[1]} words in a row for {columns} numbers, which is not num_bits="
            f"{bits}: 2, 4 and 8 bits are read"
        )
    table = unsigned(bits, 1 << (bits - 1))
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    scale_rows = scale.shape[0] if scale.shape else 1
    if scale_rows not in (1, rows) or columns % max(groups, 1):
        raise FormatError(
            f"tensor {scale.name} has shape {list(scale.shape)}, but {codes.name} stands for shape {list(shape)} and "
            "requires scales for each row whose number divides its columns"
        )
    grid = (scale_rows, groups)
    zero = None
    if "zero" in group.parts:
        zero_entry = group.parts["zero"]
        words = -(-scale_rows * bits // _INT32_BITS)
        _require_shape(zero_entry, (words, groups), codes)
        zero = StoredMatrix(zero_entry, grid, table, words_in="rows")
    parts = ScaledNumbers(
        StoredMatrix(codes, (rows, columns), table),
        StoredMatrix(scale, grid),
        (rows if scale_rows == 1 else 1, columns // groups),
        zero,
        groups=group.parts.get("groups"),
        groups_of="columns",
        others=(group.parts["shape"],),
    )
    return QuantizedTensor(parts, (rows, columns))


def _combine_packed_floats(group: Group) -> QuantizedTensor:
    """E2M1 in bytes: NVFP4 with a second scale for all, which multiplies or divides, or MXFP4."""
    codes = group.codes
    scale = group.parts["scale"]
    width = _NV_BLOCK if scale.dtype is torch.float8_e4m3fn else _MX_BLOCK
    second = group.parts.get("multiplier") or group.parts.get("divisor")
    if scale.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise FormatError(
            f"tensor {scale.name} is {dtype_name(scale.dtype)}: scales of 4-bit floats are float8_e4m3fn (NVFP4) or "
            "uint8 (MXFP4)"
        )
    if (second is None) == (width == _NV_BLOCK):
        raise FormatError(
            f"tensor {codes.name} has scales in {dtype_name(scale.dtype)} and "
            f"{'no second scale' if second is None else f'the second scale {second.name}'}: NVFP4 has a second scale, "
            "MXFP4 has none; download the checkpoint again"
        )
    *stack, rows, half = codes.shape
    columns = 2 * half
    if columns % width or scale.shape != (*stack, rows, columns // width) or len(stack) > 1:
        raise FormatError(
            f"tensor {scale.name} has shape {list(scale.shape)}, but {codes.name} of shape {list(codes.shape)} "
            f"requires {[*stack, rows, columns // width]}, one for {width} numbers"
        )
    is_stacked = bool(stack)
    grid = (rows, columns // width)
    numbers = StoredMatrix(codes, (rows, columns), E2M1, stacked=is_stacked)
    if second is None:
        scales: StoredMatrix | ScaledNumbers = StoredMatrix(scale, grid, E8M0, stacked=is_stacked)
    else:
        count = math.prod(second.shape)
        if count != (stack[0] if stack and count > 1 else 1):
            raise FormatError(
                f"tensor {second.name} has shape {list(second.shape)}, but {codes.name} requires one number"
            )
        scales = ScaledNumbers(
            StoredMatrix(scale, grid, E4M3, stacked=is_stacked),
            StoredMatrix(second, (1, 1), stacked=is_stacked and count > 1),
            grid,
            divides="divisor" in group.parts,
        )
    return QuantizedTensor(ScaledNumbers(numbers, scales, (1, width)), (*stack, rows, columns))


def _combine_gptq(group: Group) -> QuantizedTensor:
    """GPTQ: the transpose, packed along rows; a group of rows has a scale and a zero for each column."""
    codes, scale, zero = group.codes, group.parts["scale"], group.parts["zero"]
    _require_matrices(codes, scale, zero)
    groups, columns = scale.shape
    bits = _INT32_BITS * zero.shape[1] // max(columns, 1)
    is_declared = group.scheme.bits in (None, bits)
    fits = codes.shape[1] == columns and zero.shape[0] == groups
    if bits not in (2, 4, 8) or not fits or not is_declared:
        raise FormatError(
            f"tensors {_phrase(codes)}, {_phrase(zero)} and {_phrase(scale)} do not fit each other with bits="
            f"{group.scheme.bits or '2, 4 or 8'}"
        )
    rows = codes.shape[0] * _INT32_BITS // bits
    height = -(-rows // groups)
    group_index = group.parts.get("groups")
    if group_index is not None:
        _require_shape(group_index, (rows,), codes)
    parts = ScaledNumbers(
        StoredMatrix(codes, (rows, columns), unsigned(bits), words_in="rows"),
        StoredMatrix(scale, (groups, columns)),
        (height, 1),
        StoredMatrix(zero, (groups, columns), unsigned(bits)),
        zero_offset=0.0 if group.scheme.is_gptq_v2 else 1.0,
        groups=group_index,
    )
    return QuantizedTensor(parts, (columns, rows), transposed=True)


def _combine_awq(group: Group) -> QuantizedTensor:
    """AWQ: the transpose, packed along columns in an order of its own."""
    codes, scale, zero = group.codes, group.parts["scale"], group.parts["zero"]
    _require_matrices(codes, scale, zero)
    groups, columns = scale.shape
    rows = codes.shape[0]
    is_packed = codes.shape[1] * 8 == columns and zero.shape == (groups, codes.shape[1])
    if not is_packed or rows % max(groups, 1):
        raise FormatError(
            f"tensors {_phrase(codes)}, {_phrase(zero)} and {_phrase(scale)} are not AWQ of 4 bits (version gemm)"
        )
    parts = ScaledNumbers(
        StoredMatrix(codes, (rows, columns), unsigned(4), _AWQ_ORDER),
        StoredMatrix(scale, (groups, columns)),
        (rows // groups, 1),
        StoredMatrix(zero, (groups, columns), unsigned(4), _AWQ_ORDER),
    )
    return QuantizedTensor(parts, (columns, rows), transposed=True)


def _combine_bnb_4bit(group: Group) -> QuantizedTensor:
    """NF4 and FP4: one row of codes, the high half of a byte first, whose table is stored with it."""
    codes = group.codes
    state_entry = group.parts["state"]
    try:
        state = strict_json.loads(bytes(group.values("state").tolist()))
        shape = tuple(int(size) for size in state["shape"])
        block = int(state["blocksize"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"tensor {state_entry.name} is not a state of bitsandbytes") from error
    count = math.prod(shape)
    in_bytes = math.prod(codes.shape) * codes.dtype.itemsize
    if len(shape) != 2 or min(shape) < 1 or block < 1 or in_bytes != -(-count // 2):
        raise FormatError(
            f"tensor {codes.name} has {in_bytes} bytes, which is not a matrix of shape {list(shape)} in 4 bits"
        )
    scale = group.parts["scale"]
    blocks = -(-count // block)
    _require_shape(scale, (blocks,), codes)
    _require_shape(group.parts["table"], (16,), codes)
    if "nested_scale" in group.parts:
        nested_block = int(state.get("nested_blocksize", 0))
        nested = group.parts["nested_scale"]
        if nested_block < 1 or "nested_table" not in group.parts:
            raise FormatError(f"tensor {state_entry.name} has no nested_blocksize")
        _require_shape(nested, (-(-blocks // nested_block),), scale)
        _require_shape(group.parts["nested_table"], (256,), scale)
        scales: StoredMatrix | ScaledNumbers = ScaledNumbers(
            StoredMatrix(scale, (1, blocks), table_of(group.values("nested_table"))),
            StoredMatrix(nested, (1, nested.shape[0])),
            (1, nested_block),
            offset=float(state["nested_offset"]),
            others=(group.parts["nested_table"],),
        )
    else:
        scales = StoredMatrix(scale, (1, blocks))
    parts = ScaledNumbers(
        StoredMatrix(codes, (1, count), table_of(group.values("table"), high_first=True)),
        scales,
        (1, block),
        others=(group.parts["table"], state_entry),
    )
    return QuantizedTensor(parts, shape, flat=True)


def _combine_mxfp4(group: Group) -> QuantizedTensor:
    """MXFP4 of gpt-oss: stacked matrices, each stored as its transpose."""
    blocks, scales = group.codes, group.parts["scale"]
    is_right = (
        blocks.dtype is scales.dtype is torch.uint8
        and len(blocks.shape) == 4
        and blocks.shape == (*scales.shape, _MX_BLOCK // 2)
    )
    if not is_right:
        raise FormatError(
            f"tensors {_phrase(blocks)} and {_phrase(scales)} are not MXFP4, which needs "
            "uint8 [experts, rows, groups, 16] and [experts, rows, groups]"
        )
    matrices, rows, groups, _ = blocks.shape
    columns = groups * _MX_BLOCK
    parts = ScaledNumbers(
        StoredMatrix(blocks, (rows, columns), E2M1, stacked=True),
        StoredMatrix(scales, (rows, groups), E8M0, stacked=True),
        (1, _MX_BLOCK),
    )
    return QuantizedTensor(parts, (matrices, columns, rows), transposed=True)


_SCALE_ENDS = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
_BNB_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))

SCALED_WEIGHTS = Format(
    codes=".weight",
    plain=".weight",
    parts={"scale": _SCALE_ENDS},
    optional={"zero": (".weight_zero_point",)},
    combine=_combine_scaled,
    dtypes=(torch.float8_e4m3fn, torch.int8),
)
"""8-bit floats or integers: DeepSeek, Qwen, Mistral, llm-compressor, ModelOpt, Meta."""
SCALED_PARAMETERS = Format(
    codes="",
    plain="",
    parts={"scale": ("_scale_inv", "_scale")},
    combine=_combine_scaled,
    dtypes=(torch.float8_e4m3fn,),
)
"""The same for parameters that are not called ``weight``, such as stacked experts of transformers."""
PACKED_INTEGERS = Format(
    codes=".weight_packed",
    plain=".weight",
    parts={"scale": (".weight_scale",), "shape": (".weight_shape",)},
    optional={"zero": (".weight_zero_point",), "groups": (".weight_g_idx",)},
    combine=_combine_packed_integers,
    dtypes=(torch.int32,),
)
PACKED_FLOATS = Format(
    codes=".weight_packed",
    plain=".weight",
    parts={"scale": (".weight_scale",)},
    optional={"divisor": (".weight_global_scale",)},
    combine=_combine_packed_floats,
    dtypes=(torch.uint8,),
)
NVFP4 = Format(
    codes=".weight",
    plain=".weight",
    parts={"scale": (".weight_scale",)},
    optional={"multiplier": (".weight_scale_2",)},
    combine=_combine_packed_floats,
    dtypes=(torch.uint8,),
)
GPTQ = Format(
    codes=".qweight",
    plain=".weight",
    parts={"scale": (".scales",), "zero": (".qzeros",)},
    optional={"groups": (".g_idx",)},
    combine=_combine_gptq,
    dtypes=(torch.int32,),
)
AWQ = Format(
    codes=".qweight",
    plain=".weight",
    parts={"scale": (".scales",), "zero": (".qzeros",)},
    combine=_combine_awq,
    dtypes=(torch.int32,),
)
BNB_INT8 = Format(
    codes=".weight",
    plain=".weight",
    parts={"scale": (".SCB",)},
    optional={"format": (".weight_format",)},
    combine=_combine_bnb_int8,
    dtypes=(torch.int8,),
)
BNB_4BIT = Format(
    codes=".weight",
    plain=".weight",
    parts={
        "scale": (".weight.absmax",),
        "table": (".weight.quant_map",),
        "state": _BNB_STATES,
    },
    optional={
        "nested_scale": (".weight.nested_absmax",),
        "nested_table": (".weight.nested_quant_map",),
    },
    combine=_combine_bnb_4bit,
    needs="state",
)
MXFP4 = Format(
    codes="_blocks",
    plain="",
    parts={"scale": ("_scales",)},
    combine=_combine_mxfp4,
)

CODES_OF_ANY = (".qweight", ".weight_packed", "_blocks")
"""Endings of codes that no plain tensor has."""
INFERENCE_ENDS = (
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
    "prob_scale",
    "k_zero_point",
    "v_zero_point",
    "k_bias",
)
"""Last parts of the names of scales of activations and caches, which only inference uses."""


def _require_shape(entry: TensorEntry, shape: tuple[int, ...], of: TensorEntry) -> None:
    if entry.shape != shape:
        raise FormatError(
            f"tensor {entry.name} has shape {list(entry.shape)}, but {of.name} of shape {list(of.shape)} requires "
            f"{list(shape)}"
        )


def _require_matrices(*entries: TensorEntry) -> None:
    for entry in entries:
        if len(entry.shape) != 2:
            raise FormatError(
                f"tensor {entry.name} has shape {list(entry.shape)}, which is not a matrix"
            )


def _phrase(entry: TensorEntry) -> str:
    return f"{entry.name} ({dtype_name(entry.dtype)} {list(entry.shape)})"
