# SPDX-License-Identifier: Apache-2.0
"""The formats in which weights are written quantized, as vLLM, SGLang and transformers read them.

``WRITTEN_FORMATS`` has a row for each value of ``--quantize``. A row says which stored tensors a weight becomes; what
their numbers mean is the row of ``quantization_formats`` that reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.bridge.models.hf_pretrained import quantization_formats as formats
from megatron.bridge.models.hf_pretrained.quantization_formats import Format, Group, Scheme
from megatron.bridge.models.hf_pretrained.quantized_tensors import QuantizedTensor, block_grid
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry, dtype_name
from megatron.bridge.utils.errors import UserError

Shape = tuple[int, ...]
Parts = Mapping[str, tuple[torch.dtype, Shape]]  # role -> dtype and shape of a stored tensor

_WORD_BITS = 32


@dataclass(frozen=True)
class WrittenFormat:
    """One value of ``--quantize``."""

    description: str
    read_as: Format  # the format that reads it
    divisor: int  # what the columns of a matrix must divide by; 0 stands for the group size
    parts: Callable[[Shape, int, torch.dtype], Parts]
    """(shape, group size, dtype of the model) -> the stored tensors; the role of the values is ``codes``."""
    config: Callable[[Sequence[str], int], dict[str, Any]]
    """(modules that stay in full, group size) -> ``quantization_config``"""
    group_size: int | None = (
        None  # how many neighbors share a scale by default; None if that is fixed
    )
    scale_end: str | None = None  # ending of the scale's name, where the reader knows several
    shares_scale: bool = (
        False  # whether tensors of one parameter, such as q, k and v, share a scale
    )
    stacked_as: Format | None = (
        None  # the format that reads stacked experts; None if no reader does
    )
    is_transposed: bool = False  # whether stacked experts must be [in, out]


def _fp8_block_parts(shape: Shape, size: int, _: torch.dtype) -> Parts:
    grid = block_grid(shape, (size, size))
    return {"codes": (torch.float8_e4m3fn, shape), "scale": (torch.float32, grid)}


def _fp8_tensor_parts(shape: Shape, _: int, __: torch.dtype) -> Parts:
    return {"codes": (torch.float8_e4m3fn, shape), "scale": (torch.float32, (1,))}


def _int8_parts(shape: Shape, _: int, __: torch.dtype) -> Parts:
    return {"codes": (torch.int8, shape), "scale": (torch.float32, (shape[0], 1))}


def _mxfp8_parts(shape: Shape, _: int, __: torch.dtype) -> Parts:
    grid = (shape[0], shape[1] // 32)
    return {"codes": (torch.float8_e4m3fn, shape), "scale": (torch.uint8, grid)}


def _mxfp4_parts(shape: Shape, _: int, __: torch.dtype) -> Parts:
    if len(shape) == 3:  # experts of gpt-oss, [experts, in, out]
        experts, columns, rows = shape
        grid = (experts, rows, columns // 32)
        return {"codes": (torch.uint8, (*grid, 16)), "scale": (torch.uint8, grid)}
    rows, columns = shape
    return {
        "codes": (torch.uint8, (rows, columns // 2)),
        "scale": (torch.uint8, (rows, columns // 32)),
    }


def _nvfp4_parts(shape: Shape, _: int, __: torch.dtype) -> Parts:
    rows, columns = shape
    return {
        "codes": (torch.uint8, (rows, columns // 2)),
        "scale": (torch.float8_e4m3fn, (rows, columns // 16)),
        "divisor": (torch.float32, (1,)),
    }


def _int4_parts(shape: Shape, size: int, dtype: torch.dtype) -> Parts:
    rows, columns = shape
    return {
        "codes": (torch.int32, (rows, columns * 4 // _WORD_BITS)),
        "scale": (_half(dtype), (rows, columns // size)),
        "shape": (torch.int64, (2,)),
    }


def _awq_parts(shape: Shape, size: int, dtype: torch.dtype) -> Parts:
    rows, columns = shape
    words = rows * 4 // _WORD_BITS
    return {
        "codes": (torch.int32, (columns, words)),
        "zero": (torch.int32, (columns // size, words)),
        "scale": (_half(dtype), (columns // size, rows)),
    }


def _half(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scales that readers hold in the model's dtype."""
    return dtype if dtype.itemsize == 2 else torch.bfloat16


def _fp8_config(in_full: Sequence[str], size: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [size, size],
        "modules_to_not_convert": list(in_full),
    }


def _mxfp4_config(in_full: Sequence[str], _: int) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(in_full)}


def _awq_config(in_full: Sequence[str], size: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(in_full),
    }


_BY_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8}


def _compressed(
    format_name: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> Callable[[Sequence[str], int], dict[str, Any]]:
    """Return what makes the config of a format of compressed-tensors."""

    def make(in_full: Sequence[str], size: int) -> dict[str, Any]:
        sized = {"group_size": size} if weights["strategy"] == "group" else {}
        group = {
            "targets": ["Linear"],
            "weights": {"symmetric": True, "dynamic": False, **sized, **weights},
            "input_activations": activations,
            "output_activations": None,
            "format": format_name,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": format_name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(in_full),
            "kv_cache_scheme": None,
        }

    return make


WRITTEN_FORMATS: dict[str, WrittenFormat] = {
    "fp8-block": WrittenFormat(
        "8-bit floats, a scale for each block of 128 x 128 (quant_method fp8, as DeepSeek-V3)",
        formats.SCALED_WEIGHTS,
        divisor=1,
        parts=_fp8_block_parts,
        config=_fp8_config,
        group_size=128,
    ),
    "fp8-tensor": WrittenFormat(
        "8-bit floats, one scale (compressed-tensors float-quantized)",
        formats.SCALED_WEIGHTS,
        divisor=1,
        parts=_fp8_tensor_parts,
        config=_compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            {**_BY_TOKEN, "type": "float"},
        ),
        scale_end=".weight_scale",
        shares_scale=True,
    ),
    "int8": WrittenFormat(
        "8-bit integers, a scale for each row (compressed-tensors int-quantized)",
        formats.SCALED_WEIGHTS,
        divisor=1,
        parts=_int8_parts,
        config=_compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {**_BY_TOKEN, "type": "int"},
        ),
        scale_end=".weight_scale",
    ),
    "mxfp8": WrittenFormat(
        "8-bit floats, a power of two for every 32 (compressed-tensors mxfp8-quantized)",
        formats.SCALED_WEIGHTS,
        divisor=32,
        parts=_mxfp8_parts,
        config=_compressed(
            "mxfp8-quantized",
            {
                "num_bits": 8,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "scale_dtype": "torch.uint8",
                "zp_dtype": "torch.uint8",
            },
        ),
        scale_end=".weight_scale",
    ),
    "mxfp4": WrittenFormat(
        "4-bit floats, a power of two for every 32 (compressed-tensors mxfp4-pack-quantized)",
        formats.PACKED_FLOATS,
        divisor=32,
        parts=_mxfp4_parts,
        config=_compressed(
            "mxfp4-pack-quantized",
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "scale_dtype": "torch.uint8",
                "zp_dtype": "torch.uint8",
            },
        ),
        scale_end=".weight_scale",
    ),
    "nvfp4": WrittenFormat(
        "4-bit floats, an 8-bit float for every 16 and one scale (compressed-tensors "
        "nvfp4-pack-quantized)",
        formats.PACKED_FLOATS,
        divisor=16,
        parts=_nvfp4_parts,
        config=_compressed(
            "nvfp4-pack-quantized",
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "scale_dtype": "torch.float8_e4m3fn",
                "zp_dtype": "torch.float8_e4m3fn",
            },
        ),
        shares_scale=True,
    ),
    "int4": WrittenFormat(
        "4-bit integers, a scale for every 128 (compressed-tensors pack-quantized, as Kimi K2)",
        formats.PACKED_INTEGERS,
        divisor=0,
        parts=_int4_parts,
        config=_compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}),
        group_size=128,
    ),
    "int4-awq": WrittenFormat(
        "4-bit integers, a scale and a zero for every 128, in the layout of AWQ",
        formats.AWQ,
        divisor=0,
        parts=_awq_parts,
        config=_awq_config,
        group_size=128,
    ),
}
MXFP4_EXPERTS = WrittenFormat(
    "stacked experts of gpt-oss in 4-bit floats (quant_method mxfp4)",
    formats.MXFP4,
    divisor=1,
    parts=_mxfp4_parts,
    config=_mxfp4_config,
    stacked_as=formats.MXFP4,
    is_transposed=True,
)


def written_format(name: str) -> WrittenFormat:
    """Return the format called ``name``."""
    if name not in WRITTEN_FORMATS:
        raise UserError(
            f"quantize={name!r} is not one of {', '.join(WRITTEN_FORMATS)}, source or trained: use one of "
            "them"
        )
    return WRITTEN_FORMATS[name]


@dataclass(frozen=True)
class Outline:
    """A weight as it will be stored."""

    tensor: QuantizedTensor
    entries: dict[str, TensorEntry]  # the stored tensors by name; they are in no file yet
    constants: dict[str, torch.Tensor]  # those that do not depend on the values


def outline(
    row: WrittenFormat, name: str, shape: Shape, dtype: torch.dtype, group_size: int
) -> Outline:
    """Return how a weight will be stored.

    Args:
        row: the format.
        name: the weight's plain name.
        shape: its shape.
        dtype: the model's dtype.
        group_size: how many neighbors share a scale.
    """
    read_as = row.read_as if len(shape) == 2 else row.stacked_as
    if read_as is None:
        raise UserError(
            f"{name} holds all experts, which is written quantized only for gpt-oss with quantize='mxfp4': keep it in "
            f"full with --keep-high '{name}'"
        )
    divisor = row.divisor or group_size
    # rows of AWQ are packed by 8
    fits = shape[-1] % divisor == 0 and (row.read_as is not formats.AWQ or shape[0] % 8 == 0)
    if row.is_transposed:
        fits = shape[-2] % 32 == 0
    if not fits:
        remedy = " use a --group-size that divides them, or" if row.divisor == 0 else ""
        raise UserError(
            f"{name} of shape {list(shape)} does not divide into groups of {divisor} columns:{remedy} keep it in "
            f"full with --keep-high '{name}'"
        )
    base = name.removesuffix(read_as.plain) if read_as.plain else name
    entries: dict[str, TensorEntry] = {}
    by_role: dict[str, TensorEntry] = {}
    ends = {**read_as.parts, **read_as.optional}
    for role, (part_dtype, part_shape) in row.parts(shape, group_size, dtype).items():
        end = read_as.codes if role == "codes" else ends[role][0]
        if role == "scale" and row.scale_end is not None:
            end = row.scale_end
        size = torch.Size(part_shape).numel() * part_dtype.itemsize
        entry = TensorEntry(
            base + end, Path(dtype_name(part_dtype)), part_dtype, part_shape, 0, size
        )
        by_role[role] = entry
        entries[entry.name] = entry
    codes = by_role.pop("codes")
    constants = {by_role["shape"].name: torch.tensor(shape)} if "shape" in by_role else {}
    block = (
        (group_size, group_size)
        if row.read_as is formats.SCALED_WEIGHTS and row.group_size
        else None
    )
    tensor = read_as.combine(Group(codes, by_role, Scheme(block), constants))
    return Outline(tensor, entries, constants)
