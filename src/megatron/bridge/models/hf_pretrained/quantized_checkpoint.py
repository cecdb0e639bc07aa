# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with quantized weights, read like the checkpoints that they were made from.

A quantized tensor and its scales appear as one tensor under its plain name, in the dtype of the model. All stored
tensors must be accounted for; a scale that is missing, unused or of the wrong shape is refused. Formats are declared
in ``quantization_formats``, methods in ``quantization_configs``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.models.hf_pretrained import safetensors_writer
from megatron.bridge.models.hf_pretrained.pickled_checkpoint import PickledCheckpoint, is_pickled
from megatron.bridge.models.hf_pretrained.quantization_configs import (
    METHODS,
    check,
    quantization_of,
    scheme_finder,
)
from megatron.bridge.models.hf_pretrained.quantization_formats import (
    CODES_OF_ANY,
    INFERENCE_ENDS,
    Entries,
    Format,
    FormatError,
    Group,
    Scheme,
)
from megatron.bridge.models.hf_pretrained.quantized_tensors import QuantizedTensor
from megatron.bridge.models.hf_pretrained.safetensors_files import (
    SafetensorsCheckpoint,
    TensorEntry,
    dtype_name,
)
from megatron.bridge.utils.errors import UserError, first_problems


@dataclass
class SearchResult:
    """What the stored tensors of a checkpoint stand for."""

    packed: dict[str, QuantizedTensor] = field(default_factory=dict[str, QuantizedTensor])
    """Quantized tensors by plain name."""
    claimed: set[str] = field(default_factory=set[str])
    """Stored tensors that do not appear."""
    problems: list[str] = field(default_factory=list[str])


FindUnread = Callable[[Iterable[str]], Iterable[str]]
"""Returns those of some tensors that transformers' model does not load."""


def open_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    strip_prefix: str = "",
    find_unread: FindUnread = lambda names: (),
) -> SafetensorsCheckpoint:
    """Return the weights of a model.

    Args:
        directory: the model's folder.
        config: its ``config.json``.
        dtype: dtype in which quantized tensors appear; bfloat16 when None.
        strip_prefix: prefix of all names in the files, which is left out.
        find_unread: which tensors the model does not have.
    """
    quantization = quantization_of(config, directory)
    if quantization is None:
        return open_unquantized(directory, strip_prefix)
    check(quantization)
    return QuantizedCheckpoint(
        directory, quantization, dtype or torch.bfloat16, strip_prefix, find_unread
    )


def open_unquantized(directory: Path, strip_prefix: str = "") -> SafetensorsCheckpoint:
    """Return the tensors in ``directory`` as they are stored."""
    if is_pickled(directory):
        return PickledCheckpoint(directory, strip_prefix)
    return SafetensorsCheckpoint(directory, strip_prefix)


def write_in_full(checkpoint: "QuantizedCheckpoint", directory: Path) -> None:
    """Write the weights of ``checkpoint`` in full, one tensor in memory at a time."""
    specs = {name: (entry.dtype, entry.shape) for name, entry in checkpoint.entries.items()}
    layouts = safetensors_writer.new_output_files(specs)
    safetensors_writer.create(directory, layouts)
    with safetensors_writer.Writer(directory, layouts) as writer:
        for name in specs:
            writer.write(name, 0, checkpoint[name])
            checkpoint.release(name)
    safetensors_writer.write_index(directory, layouts, None)


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
        find_unread: FindUnread = lambda names: (),
    ) -> None:
        super().__init__(directory)
        self.as_stored = False
        self.config = config
        """The ``quantization_config``."""
        self.stored = open_unquantized(directory, strip_prefix)
        """The tensors as they are in the files."""
        self._dtype = dtype
        self._find_unread = find_unread

    @property
    def method(self) -> str:
        return self.config["quant_method"]

    @cached_property
    def files(self) -> dict[str, tuple[dict[str, TensorEntry], dict[str, str]]]:
        """File name -> the tensors stored in it, scales among them, and its metadata."""
        return self.stored.files

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """All tensors as they appear, each in the file that holds its largest part."""
        full_entries: dict[str, TensorEntry] = {}
        plain_name = {packed.sources[0].name: name for name, packed in self.packed.items()}
        for name, entry in self.stored.entries.items():
            if name in plain_name:
                packed = self.packed[plain_name[name]]
                full_entries[plain_name[name]] = replace(
                    entry, name=plain_name[name], dtype=self._dtype, shape=packed.shape
                )
            elif name not in self._search_result.claimed:
                full_entries[name] = entry
        return full_entries

    @property
    def packed(self) -> dict[str, QuantizedTensor]:
        """The quantized tensors by plain name."""
        return self._search_result.packed

    @cached_property
    def beside_weights(self) -> list[str]:
        """Stored tensors of no weight: scales of activations and caches, and biases that the model does not have."""
        of_weights = {entry.name for packed in self.packed.values() for entry in packed.sources}
        return [
            name for name in self.stored.entries if name in self._search_result.claimed - of_weights
        ]

    @cached_property
    def _search_result(self) -> SearchResult:
        method = METHODS[self.method]
        entries = self.stored.entries
        result = find_tensors(entries, method.formats, scheme_finder(self.config), self.stored)
        if not result.packed and not result.problems:
            result.problems.append(
                f"config.json has a quantization_config ({self.method}), but no weight in {self.directory} is "
                "quantized: remove quantization_config from config.json"
            )
        if result.problems:
            raise UserError(first_problems(result.problems))
        if self.config.get("activation_scheme") != "dynamic":
            result.claimed |= {name for name in entries if name.endswith(INFERENCE_ENDS)}
        result.claimed |= set(self._find_unread(self._zero_biases(result)))
        return result

    def _zero_biases(self, result: SearchResult) -> list[str]:
        """Return the biases of zero, which tools of GPTQ store for every layer, whether the model has one or not."""
        biases = [name.removesuffix("weight") + "bias" for name in result.packed]
        stored = [name for name in biases if name in self.stored.entries]
        return [name for name in stored if not self.stored[name].any()]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.packed:
            return self.stored[name]
        entry = self.entries[name]
        full_tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.packed[name].fill(self.stored, (), full_tensor)
        return full_tensor

    def copy(self, name: str, index: tuple[int | slice, ...], target: Tensor) -> None:
        """Copy a part of a tensor into ``target``; only that part is dequantized."""
        if name not in self.packed:
            super().copy(name, index, target)
            return
        packed = self.packed[name]
        packed.fill(self.stored, index, target)
        stored = packed.sources[0]
        full_numel = torch.Size(packed.shape).numel()
        self._count(target.numel() * (stored.end - stored.begin) // max(full_numel, 1))

    def release(self, name: str, row: int | None = None) -> None:
        sources = self.packed[name].sources if name in self.packed else (self.entries[name],)
        stack = self.packed[name].shape[0] if name in self.packed else None
        for entry in sources:  # the rows of packed matrices are those of each of their parts
            is_stacked = stack is None or entry.shape[:1] == (stack,)
            self.stored.release(entry.name, row if is_stacked else None)


def find_tensors(
    entries: Entries,
    formats: tuple[Format, ...],
    scheme_of: Callable[[str], Scheme],
    stored: Mapping[str, Tensor],
) -> SearchResult:
    """Find the quantized tensors of a checkpoint.

    Args:
        entries: all stored tensors.
        formats: the formats that it may have.
        scheme_of: what the config declares about the module of a plain name.
        stored: the values of the stored tensors.
    """
    result = SearchResult()
    for row in formats:
        for name, entry in entries.items():
            if name in result.claimed or not _is_code(row, name, entry, entries):
                continue
            base = name.removesuffix(row.codes)
            plain = base + row.plain
            parts = _parts_of(row, base, entries)
            missing = [role for role in row.parts if role not in parts]
            if missing:
                lacking = base + row.parts[missing[0]][0]
                result.problems.append(
                    f"tensor {name} is {dtype_name(entry.dtype)}, but its {missing[0]} {lacking} is missing: download "
                    f"the checkpoint again (in {entry.file.name})"
                )
                result.claimed |= {part.name for part in parts.values()}
                continue
            if plain != name and plain in entries:
                result.problems.append(
                    f"tensor {plain} is in the checkpoint both in full and as {name}: remove one"
                )
            try:
                tensor = row.combine(Group(entry, parts, scheme_of(plain), stored))
            except FormatError as error:
                result.problems.append(f"{error} (in {entry.file.name})")
            else:
                result.packed[plain] = tensor
                result.claimed.add(name)
            result.claimed |= {part.name for part in parts.values()}
    _name_left_over(result, entries, formats)
    return result


def _is_code(row: Format, name: str, entry: TensorEntry, entries: Entries) -> bool:
    if not name.endswith(row.codes) or (row.dtypes and entry.dtype not in row.dtypes):
        return False
    if row.codes == "" and name.endswith((".weight", *INFERENCE_ENDS)):
        return False
    base = name.removesuffix(row.codes)
    if row.codes == "":
        is_scale = name.endswith(("_scale", "_scale_inv", "_scale_2"))
        return not is_scale
    return not row.needs or any(base + end in entries for end in row.parts[row.needs])


def _parts_of(row: Format, base: str, entries: Entries) -> dict[str, TensorEntry]:
    parts: dict[str, TensorEntry] = {}
    for role, ends in (*row.parts.items(), *row.optional.items()):
        for end in ends:
            if base + end in entries:
                parts[role] = entries[base + end]
                break
    return parts


def _name_left_over(result: SearchResult, entries: Entries, formats: tuple[Format, ...]) -> None:
    """Add a problem for each part whose codes are not there or not quantized, and for codes of other formats."""
    for name, entry in entries.items():
        if name in result.claimed:
            continue
        if name.endswith(CODES_OF_ANY) and not entry.dtype.is_floating_point:
            result.problems.append(
                f"tensor {name} in {entry.file.name} is {dtype_name(entry.dtype)}, which is not of a format that "
                "quant_method of quantization_config has: a checkpoint has one method"
            )
            continue
        for row in formats:
            end = next((end for end in row.endings() if name.endswith(end)), None)
            if end is None or end == ".scale":
                continue
            codes = name.removesuffix(end) + row.codes
            if row.codes == "" and "weight" not in name and codes not in entries:
                continue
            state = "is not in the checkpoint"
            if codes in entries:
                state = f"is {dtype_name(entries[codes].dtype)}"
            result.problems.append(
                f"tensor {name} scales {codes}, which {state} (in {entry.file.name})"
            )
            break
