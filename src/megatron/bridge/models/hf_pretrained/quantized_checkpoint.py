# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with quantized weights, read like the checkpoints that they were made from.

A quantized tensor and its scales appear as one tensor under its plain name, in the dtype of the model. All stored
tensors must be accounted for; a scale that is missing, unused or of the wrong shape is refused.

Values have 8 or 4 bits, with a scale for each block. Only the bytes of the requested part are read, and temporary
tensors take less than a megabyte, so a rank that needs a tenth of a tensor does a tenth of the work.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron.bridge.models.hf_pretrained.pickled_checkpoint import PickledCheckpoint, is_pickled
from megatron.bridge.models.hf_pretrained.safetensors_files import (
    SafetensorsCheckpoint,
    TensorEntry,
    dtype_name,
)
from megatron.bridge.utils.errors import UserError, did_you_mean, first_problems

Index = Sequence[int | slice]

_BYTES = torch.arange(256, dtype=torch.uint8)
# the value of each byte: a table is twice as fast as torch's conversion of float8
_E4M3 = _BYTES.view(torch.float8_e4m3fn).float()
# the values of E2M1, sign in the highest bit (OCP Microscaling Formats 1.0, section 5.3.3)
_E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
_E2M1_PAIRS = torch.stack((_E2M1[(_BYTES & 0xF).int()], _E2M1[(_BYTES >> 4).int()]), dim=-1)
_MX_BLOCK = 32  # values that share a scale
_MX_BYTES = _MX_BLOCK // 2
_E8M0_BIAS = 127
_AT_ONCE = 1 << 17  # values unpacked at a time: half a megabyte, which fits into the CPU cache


@dataclass(frozen=True)
class BlockScaledFP8:
    """A matrix of 8-bit floats; each block of ``block`` rows and columns is multiplied by its scale."""

    weight: TensorEntry  # [rows, columns] in float8
    # [ceil(rows / block rows), ceil(columns / block columns)], or a single number of any shape
    scale: TensorEntry
    block: tuple[int, int] | None  # rows and columns that share a scale; None for one scale

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that make it up."""
        return self.weight, self.scale

    def fill(self, stored: Mapping[str, Tensor], index: Index, target: Tensor) -> None:
        """Compute ``tensor[index]`` in float32 and copy it into ``target``.

        Works on one row of blocks at a time, whose scales are a vector over its columns.

        Args:
            stored: the stored tensors by name.
            index: integers for leading dimensions, slices for the others.
            target: of the part's shape, in any dtype.
        """
        height, width = self.block or self.shape
        rows, columns = map(_range_of, self.shape, _full_index(index, 2))
        scale = stored[self.scale.name].float().reshape(-(-self.shape[0] // height), -1)
        weight = stored[self.weight.name][:, _slice_of(columns)]
        of_column = torch.arange(columns.start, columns.stop, columns.step).div(
            width, rounding_mode="floor"
        )
        at_once = max(1, _AT_ONCE // max(1, len(columns)))
        for block_row, here, there in _block_spans(rows, height, at_once):
            factors = scale[block_row, of_column] if scale.numel() > 1 else scale[0]
            target[there].copy_(_look_up(_E4M3, weight[here].view(torch.uint8)).mul_(factors))


@dataclass(frozen=True)
class MXFP4:
    """Matrices of 4-bit floats, stored transposed; 32 neighbors share a power of two (MXFP4)."""

    blocks: TensorEntry  # [matrices, columns, groups, 16] bytes; the low half of a byte is the first of two values
    scales: TensorEntry  # [matrices, columns, groups] exponents in E8M0

    @property
    def shape(self) -> tuple[int, ...]:
        """[matrices, 32 x groups, columns]."""
        matrices, columns, groups, _ = self.blocks.shape
        return matrices, groups * _MX_BLOCK, columns

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        return self.blocks, self.scales

    def fill(self, stored: Mapping[str, Tensor], index: Index, target: Tensor) -> None:
        """The same, one matrix and some columns at a time."""
        which, *inner = _full_index(index, 3)
        if isinstance(which, slice):
            for matrix, part in zip(range(self.shape[0])[which], target, strict=True):
                self.fill(stored, (matrix, *inner), part)
            return
        rows, columns = map(_range_of, self.shape[1:], inner)
        groups = slice(rows.start // _MX_BLOCK, -(-rows.stop // _MX_BLOCK))
        skip = groups.start * _MX_BLOCK
        blocks, scales = (
            stored[entry.name][which, _slice_of(columns), groups] for entry in self.sources
        )
        step = max(1, _AT_ONCE // max(1, blocks[:1].numel() * 2))
        for start in range(0, len(columns), step):
            part = _unpack_blocks(blocks[start : start + step], scales[start : start + step])
            target[:, start : start + step].copy_(
                part[:, rows.start - skip : rows.stop - skip : rows.step].t()
            )


QuantizedTensor = BlockScaledFP8 | MXFP4
"""One tensor that is stored as several."""


def _unpack_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """[columns, 32 x groups] from [columns, groups, 16] bytes and [columns, groups] exponents."""
    numbers = _look_up(_E2M1_PAIRS, blocks).flatten(-2)
    return numbers.mul_(torch.exp2(scales.float() - _E8M0_BIAS).unsqueeze(-1)).flatten(-2)


def _look_up(table: Tensor, stored: Tensor) -> Tensor:
    """The entries of ``table`` for the bytes in ``stored``, in its shape."""
    return table.index_select(0, stored.reshape(-1).int()).view(*stored.shape, *table.shape[1:])


def block_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of a matrix's scales; blocks at its edges may be smaller."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def is_mxfp4(blocks: TensorEntry, scales: TensorEntry) -> bool:
    """Whether two stored tensors are the blocks and scales of MXFP4 matrices."""
    right_bytes = blocks.dtype is scales.dtype is torch.uint8
    return right_bytes and len(blocks.shape) == 4 and blocks.shape == (*scales.shape, _MX_BYTES)


def _full_index(index: Index, dimensions: int) -> list[int | slice]:
    return [*index, *[slice(None)] * (dimensions - len(index))]


def _range_of(size: int, part: int | slice) -> range:
    """The indices of a slice of ``size`` rows or columns."""
    assert isinstance(part, slice), "rows and columns are indexed by slices"
    return range(size)[part]


def _slice_of(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)


def _block_spans(indices: range, length: int, limit: int) -> Iterator[tuple[int, slice, slice]]:
    """(block, indices in it, their positions in ``indices``), for up to ``limit`` of ``indices`` at a time."""
    at = 0
    while at < len(indices):
        block = indices[at] // length
        count = -(-((block + 1) * length - indices[at]) // indices.step)
        here = indices[at : at + min(count, limit)]
        yield block, _slice_of(here), slice(at, at + len(here))
        at += len(here)


_WAY_OUT = "convert a bfloat16 or float32 version, from its authors or from save_pretrained of transformers"

Entries = Mapping[str, TensorEntry]
Found = tuple[dict[str, QuantizedTensor], list[str], list[str]]
"""Packed tensors by plain name, names of their other stored tensors, problems."""


def _accept_anything(_: Any) -> bool:
    return True


def _is_block(value: Any) -> bool:
    return value is None or (
        len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value)
    )


# method -> key of quantization_config -> whether its value can be represented
_METHODS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "fp8": {
        "activation_scheme": ("dynamic", "static").__contains__,
        "weight_block_size": _is_block,
        "fmt": ("e4m3", None).__contains__,
        "scale_fmt": ("float", "ue8m0", None).__contains__,
        "expert_dtype": ("fp8", None).__contains__,
        "dequantize": _accept_anything,
        **dict.fromkeys(
            ("modules_to_not_convert", "modules_to_convert", "ignored_layers"), _accept_anything
        ),
    },
    "mxfp4": {"dequantize": _accept_anything, "modules_to_not_convert": _accept_anything},
}


def check(config: Mapping[str, Any]) -> str:
    """Check a ``quantization_config``; returns its method."""
    method = config.get("quant_method")
    if method not in _METHODS:
        raise UserError(
            f"quantization_config.quant_method={method!r} is not supported: use {' or '.join(_METHODS)}, or {_WAY_OUT}"
        )
    known = _METHODS[method]
    for key, value in config.items():
        if key == "quant_method":
            continue
        if key not in known:
            hint = did_you_mean(key, known)
            raise UserError(
                f"quantization_config.{key}={value!r} is not known for quant_method={method!r}{hint or '; '}"
                f"{'' if hint else _WAY_OUT}"
            )
        if not known[key](value):
            raise UserError(
                f"quantization_config.{key}={value!r} is not supported with quant_method={method!r}: {_WAY_OUT}"
            )
    return method


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face config of the dequantized model."""
    plain = dict(config)
    if plain.get("quantization_config") is not None:
        check(_as_plain_dict(plain.pop("quantization_config")))
    return plain


def open_checkpoint(
    directory: Path, config: Mapping[str, Any], dtype: torch.dtype | None, strip_prefix: str = ""
) -> SafetensorsCheckpoint:
    """Return the weights of a model.

    Args:
        directory: the model's folder.
        config: its ``config.json``.
        dtype: dtype in which quantized tensors appear; bfloat16 when None.
        strip_prefix: prefix of all names in the files, which is left out.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return open_unquantized(directory, strip_prefix)
    check(quantization)
    return QuantizedCheckpoint(directory, quantization, dtype or torch.bfloat16, strip_prefix)


def open_unquantized(directory: Path, strip_prefix: str = "") -> SafetensorsCheckpoint:
    """Return the tensors in ``directory`` as they are stored."""
    if is_pickled(directory):
        return PickledCheckpoint(directory, strip_prefix)
    return SafetensorsCheckpoint(directory, strip_prefix)


class QuantizedCheckpoint(SafetensorsCheckpoint):
    """A checkpoint whose quantized tensors appear dequantized.

    Args:
        dtype: dtype in which quantized tensors appear; a part that is copied is computed in float32 and rounded
            to the target's dtype only.
    """

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        dtype: torch.dtype,
        strip_prefix: str = "",
    ) -> None:
        super().__init__(directory)
        self.as_stored = False
        self._stored = SafetensorsCheckpoint(directory, strip_prefix)
        self._config = config
        self._dtype = dtype

    @property
    def method(self) -> str:
        return self._config["quant_method"]

    @cached_property
    def files(self) -> dict[str, tuple[dict[str, TensorEntry], dict[str, str]]]:
        """File name -> the tensors stored in it, scales among them, and its metadata."""
        return self._stored.files

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """All tensors as they appear, each in the file that holds its largest part."""
        belongings = set(self._found[1])
        full_entries: dict[str, TensorEntry] = {}
        plain_name = {packed.sources[0].name: name for name, packed in self._packed.items()}
        for name, entry in self._stored.entries.items():
            if name in plain_name:
                packed = self._packed[plain_name[name]]
                full_entries[plain_name[name]] = replace(
                    entry, name=plain_name[name], dtype=self._dtype, shape=packed.shape
                )
            elif name not in belongings:
                full_entries[name] = entry
        return full_entries

    @property
    def _packed(self) -> dict[str, QuantizedTensor]:
        return self._found[0]

    @cached_property
    def _found(self) -> Found:
        stored = self._stored.entries
        quantized = (
            _find_microscaled(stored)
            if self.method == "mxfp4"
            else _block_scaled(stored, self._config)
        )
        packed, _, problems = quantized
        if not packed and not problems:
            problems.append(
                f"config.json has a quantization_config ({self.method}), but no weight in {self.directory} is "
                "quantized: remove quantization_config from config.json"
            )
        if problems:
            raise UserError(first_problems(problems))
        return quantized

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._packed:
            return self._stored[name]
        entry = self.entries[name]
        full_tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self._packed[name].fill(self._stored, (), full_tensor)
        return full_tensor

    def copy(self, name: str, index: tuple[int | slice, ...], target: Tensor) -> None:
        """Copy a part of a tensor into ``target``; only that part is dequantized."""
        if name not in self._packed:
            super().copy(name, index, target)
            return
        packed = self._packed[name]
        packed.fill(self._stored, index, target)
        stored = packed.sources[0]
        full_numel = torch.Size(packed.shape).numel()
        self._count(target.numel() * (stored.end - stored.begin) // max(full_numel, 1))

    def release(self, name: str, row: int | None = None) -> None:
        sources = self._packed[name].sources if name in self._packed else (self.entries[name],)
        for entry in sources:  # the rows of packed matrices are those of each of their parts
            self._stored.release(entry.name, row)


_SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Ends of the names of scales: DeepSeek's and transformers', and those of vLLM, AutoFP8 and llm-compressor."""
_INFERENCE_SCALES = ("activation_scale", "input_scale", "output_scale", "k_scale", "v_scale")


def _block_scaled(stored: Entries, config: Mapping[str, Any]) -> Found:
    """Find tensors ``name`` in float8 with scales ``name_scale_inv`` or ``name_scale``.

    Either is what a stored value is multiplied by. The scales of activations are only for inference.
    """
    block_size = cast(Sequence[int] | None, config.get("weight_block_size"))
    block = None if block_size is None else (block_size[0], block_size[1])
    packed: dict[str, QuantizedTensor] = {}
    scale_names: list[str] = []
    problems: list[str] = []
    for name, entry in stored.items():
        weight_name = next(
            (name.removesuffix(end) for end in _SCALE_SUFFIXES if name.endswith(end)), None
        )
        is_scale = name.endswith((_SCALE_SUFFIXES[0], "weight_scale"))
        if weight_name is not None and is_scale:
            scale_names.append(name)
            if not _is_float8(stored.get(weight_name)):
                problems.append(
                    f"tensor {name} scales {weight_name}, which {_actual_state(stored, weight_name)}"
                )
        if not _is_float8(entry):
            continue
        scale = next((stored[name + end] for end in _SCALE_SUFFIXES if name + end in stored), None)
        own_block = block
        if scale is not None and block is None and _is_per_row(entry, scale):
            own_block = (1, entry.shape[1])
        problem = _wrong_scale(entry, scale, own_block)
        if problem or scale is None:
            problems.append(problem or "")
        else:
            packed[name] = BlockScaledFP8(entry, scale, own_block)
    modules = {name.rpartition(".")[0] for name in packed}
    ends = _INFERENCE_SCALES if config.get("activation_scheme") == "static" else ()
    inference_scales = [f"{module}.{end}" for module in modules for end in ends]
    scales = [*scale_names, *(name for name in inference_scales if name in stored)]
    return packed, scales, problems


def _is_per_row(weight: TensorEntry, scale: TensorEntry) -> bool:
    """Return whether each row of a matrix, which is an output channel, has its scale."""
    rows = weight.shape[0] if len(weight.shape) == 2 else 0
    return rows > 1 and scale.shape in ((rows, 1), (rows,))


def _is_float8(entry: TensorEntry | None) -> bool:
    return entry is not None and entry.dtype is torch.float8_e4m3fn


def _actual_state(stored: Entries, name: str) -> str:
    return f"is {dtype_name(stored[name].dtype)}" if name in stored else "is not in the checkpoint"


def _wrong_scale(
    weight: TensorEntry, scale: TensorEntry | None, block: tuple[int, int] | None
) -> str | None:
    if scale is None:
        return (
            f"tensor {weight.name} is {dtype_name(weight.dtype)}, but its scale {weight.name}_scale_inv is missing: "
            "download the checkpoint again"
        )
    if len(weight.shape) != 2:
        return f"tensor {weight.name} is {dtype_name(weight.dtype)} of shape {list(weight.shape)}, not a matrix"
    if not scale.dtype.is_floating_point:
        return f"tensor {scale.name} is {dtype_name(scale.dtype)}, not a float"
    if block is None:
        is_right = torch.Size(scale.shape).numel() == 1
        requirement = "one number"
    else:
        grid = block_grid(weight.shape, block)
        is_right = scale.shape == grid or (block[0] == 1 and scale.shape == grid[:1])
        requirement = f"shape {list(grid)}"
    if is_right:
        return None
    return (
        f"tensor {scale.name} has shape {list(scale.shape)}, but weight_block_size={block} and the shape "
        f"{list(weight.shape)} of {weight.name} require {requirement}"
    )


def _find_microscaled(stored: Entries) -> Found:
    """Tensors ``name_blocks`` with scales ``name_scales``."""
    packed: dict[str, QuantizedTensor] = {}
    problems: list[str] = []
    plain = dict.fromkeys(
        name.removesuffix(suffix)
        for name in stored
        for suffix in ("_blocks", "_scales")
        if name.endswith(suffix)
    )
    for name in plain:
        blocks = stored.get(f"{name}_blocks")
        scales = stored.get(f"{name}_scales")
        if blocks is None or scales is None:
            missing = "blocks" if blocks is None else "scales"
            problems.append(
                f"tensor {name}_{missing} is missing from the checkpoint: download it again"
            )
        elif name in stored:
            problems.append(
                f"tensor {name} is in the checkpoint both in full and as {blocks.name}: remove one"
            )
        elif not is_mxfp4(blocks, scales):
            problems.append(
                f"tensors {blocks.name} {_entry_phrase(blocks)} and {scales.name} "
                f"{_entry_phrase(scales)} are not MXFP4, which needs "
                "uint8 [experts, rows, groups, 16] and [experts, rows, groups]"
            )
        else:
            packed[name] = MXFP4(blocks, scales)
    return packed, [f"{name}_scales" for name in plain], problems


def _entry_phrase(entry: TensorEntry) -> str:
    return f"({dtype_name(entry.dtype)} {list(entry.shape)})"


def _as_plain_dict(quantization: Any) -> Mapping[str, Any]:
    """A ``quantization_config`` as a dict; transformers may have made it an object."""
    if isinstance(quantization, Mapping):
        return cast(Mapping[str, Any], quantization)
    plain: Iterable[tuple[str, Any]] = quantization.to_dict().items()
    return {key: getattr(value, "value", value) for key, value in plain}
