# SPDX-License-Identifier: Apache-2.0
"""Quantize the weights of an export: in a format that the caller chooses, or as the source stores them.

A quantizer stands between the export, which produces full tensors under plain names, and the files, which hold codes
and scales. Only one tensor at a time is quantized, by the rank that writes it.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.bridge.backends.low_bit.matrices import is_always_in_full, is_matrix
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, WeightConversionTask
from megatron.bridge.models.conversion.mappings.base import MegatronParamMapping
from megatron.bridge.models.features.quantization_aware import is_rounded
from megatron.bridge.models.hf_pretrained.quantized_checkpoint import QuantizedCheckpoint
from megatron.bridge.models.hf_pretrained.safetensors_files import SafetensorsCheckpoint
from megatron.bridge.models.hf_pretrained.written_formats import (
    MXFP4_EXPERTS,
    Outline,
    WrittenFormat,
    outline,
    written_format,
)
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError, did_you_mean

AS_SOURCE = "source"
AS_TRAINED = "trained"
Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtypes and shapes of tensors by name


class Quantizer(Protocol):
    """What an export asks to write some of its tensors quantized."""

    def layout(self, plan: ConversionPlan, exported: Specs) -> Specs:
        """Return the tensors to store for ``exported``, in its order."""
        ...

    def covers(self, task: WeightConversionTask) -> bool:
        """Whether some of a task's tensors are stored quantized, after ``layout``."""
        ...

    def encode(
        self, task: WeightConversionTask, full_tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the stored tensors for full ones; of a stack, those of one expert."""
        ...

    def copied(self) -> Mapping[str, Tensor]:
        """Return tensors that are stored as they are, once."""
        ...

    def summary(self) -> str:
        """Return what was written, for the last line of an export; all ranks must call this."""
        ...


class ToFormat:
    """Quantizes the matrices of attention, MLPs and experts to one format.

    Args:
        name: one of ``WRITTEN_FORMATS``.
        group_size: how many neighbors share a scale; None takes the format's.
        keep_high: patterns of Hugging Face names that stay in full, besides embeddings, routers, heads and norms.
        model_type: ``model_type`` of the Hugging Face config.
        is_rounded: whether training rounded a Megatron parameter, given by name: these are quantized, and no others.
            None quantizes all that the format can hold.
    """

    def __init__(
        self,
        name: str,
        group_size: int | None = None,
        keep_high: Sequence[str] = (),
        model_type: str | None = None,
        is_rounded: Callable[[str], bool] | None = None,
    ) -> None:
        row = format_for(name, model_type)
        if group_size is not None and (row.group_size is None or group_size < 1):
            raise UserError(
                f"group_size={group_size} cannot be used with quantize={name!r}: "
                f"{'it must be at least 1' if row.group_size else 'the format has its own'}"
            )
        self.name = name
        self._row: WrittenFormat = row
        self._size = group_size or row.group_size or 0
        self._keep_high = tuple(keep_high)
        self._is_rounded = is_rounded
        self._outlines: dict[str, Outline] = {}
        self._modules_in_full: list[str] = []

    @property
    def config(self) -> dict[str, Any]:
        """The ``quantization_config``, after ``layout``."""
        return self._row.config(self._modules_in_full, self._size)

    def summary(self) -> str:
        """Return what was written, for the last line of an export; all ranks must call this."""
        return f" ({len(self._outlines)} tensors in {self.name}, the others in full)"

    def layout(self, plan: ConversionPlan, exported: Specs) -> Specs:
        """Return the tensors to store for ``exported``, in its order."""
        self._check_patterns(exported)
        self._outlines = {}
        for task in plan.tasks:
            if self._is_quantized(task):
                for name in task.mapping.hf_names:
                    self._add_outline(task, name, exported)
        if not self._outlines:
            raise UserError(
                f"quantize={self.name!r} finds no matrix to quantize: every one is kept in full or stored transposed"
            )
        self._modules_in_full = _modules_of_matrices(exported, self._outlines)
        stored: Specs = {}
        for name, spec in exported.items():
            if name in self._outlines:
                entries = self._outlines[name].entries
                stored |= {part: (entry.dtype, entry.shape) for part, entry in entries.items()}
            else:
                stored[name] = spec
        return stored

    def _is_quantized(self, task: WeightConversionTask) -> bool:
        """Whether a task's matrices are to be quantized."""
        if task.is_copy or not is_matrix(task.global_param_name):
            return False
        return self._is_rounded is None or self._is_rounded(task.global_param_name)

    def _add_outline(self, task: WeightConversionTask, name: str, exported: Specs) -> None:
        """Note how a tensor of a task will be stored, if the format can hold it."""
        dtype, shape = exported.get(name, (torch.bfloat16, ()))
        is_matrix = len(shape) == 2 and can_hold(self._row, task.mapping)
        if (is_matrix or task.mapping.is_stacked) and not self._stays_in_full(name):
            self._outlines[name] = outline(self._row, name, shape, dtype, self._size)
        elif self._is_rounded is not None:
            raise UserError(
                f"{name} was trained with model.qat={self.name!r}, in which it cannot be stored: name a format with "
                "--quantize, or train with model.qat_keep_high for this layer"
            )

    def covers(self, task: WeightConversionTask) -> bool:
        """Whether some of a task's tensors are stored quantized, after ``layout``."""
        return any(name in self._outlines for name in task.mapping.hf_names)

    def encode(
        self, task: WeightConversionTask, full_tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the stored tensors for full ones; of a stack, those of one expert.

        The tensors of one Megatron parameter, such as q, k and v, are one matrix for vLLM, so they share a scale
        where one scale is for a full tensor.
        """
        del task
        _refuse_invalid(full_tensors, self._outlines)
        largest = None
        if self._row.shares_scale:
            of_each = [
                tensor.abs().amax().float()
                for name, tensor in full_tensors.items()
                if name in self._outlines
            ]
            largest = torch.stack(of_each).amax().cpu()
        stored: dict[str, Tensor] = {}
        for name, tensor in full_tensors.items():
            if name in self._outlines:
                outlined = self._outlines[name]
                stored |= outlined.tensor.encode(tensor, largest) | outlined.constants
            else:
                stored[name] = tensor
        return stored

    def copied(self) -> Mapping[str, Tensor]:
        """Return tensors that are stored as they are, once."""
        return {}

    def _stays_in_full(self, name: str) -> bool:
        return is_always_in_full(name) or any(fnmatch(name, pattern) for pattern in self._keep_high)

    def _check_patterns(self, exported: Specs) -> None:
        for pattern in self._keep_high:
            if not any(fnmatch(name, pattern) for name in exported):
                raise UserError(
                    f"keep_high={pattern!r} matches no tensor{did_you_mean(pattern, exported) or ': leave it out'}"
                )


class AsSource:
    """Stores what was not trained bitwise as in a quantized source, and the rest in the same format.

    Args:
        source: the quantized checkpoint.
    """

    def __init__(self, source: SafetensorsCheckpoint | None) -> None:
        if not isinstance(source, QuantizedCheckpoint):
            raise UserError(
                "quantize='source' stores weights as their source does, but the source is not quantized: name a format"
            )
        self._source = source
        self._lock = threading.Lock()
        self.unchanged: dict[str, bool] = {}
        """Quantized tensors that this rank wrote -> whether they are those of the source."""

    @property
    def stored(self) -> SafetensorsCheckpoint:
        """The source as its files are."""
        return self._source.stored

    def summary(self) -> str:
        """Return what was written, for the last line of an export; all ranks must call this."""
        unchanged: dict[str, bool] = {}
        for of_rank in distributed.all_gather_object(self.unchanged):
            for name, is_unchanged in of_rank.items():
                unchanged[name] = unchanged.get(name, True) and is_unchanged
        count = sum(unchanged.values())
        return (
            f" ({count} quantized tensors bitwise as in the source, {len(unchanged) - count} quantized anew in its "
            f"format, {self._source.method})"
        )

    def layout(self, plan: ConversionPlan, exported: Specs) -> Specs:
        """Return the tensors to store for ``exported``."""
        del plan
        stored: Specs = {}
        packed = self._source.packed
        for name, spec in exported.items():
            if name in packed:
                stored |= {entry.name: (entry.dtype, entry.shape) for entry in packed[name].sources}
            else:
                stored[name] = spec
        entries = self._source.stored.entries
        return stored | {
            name: (entries[name].dtype, entries[name].shape) for name in self._source.beside_weights
        }

    def covers(self, task: WeightConversionTask) -> bool:
        """Whether some of a task's tensors are stored quantized."""
        return any(name in self._source.packed for name in task.mapping.hf_names)

    def encode(
        self, task: WeightConversionTask, full_tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the stored tensors for full ones; of a stack, those of one expert."""
        stored: dict[str, Tensor] = {}
        _refuse_invalid(full_tensors, self._source.packed)
        for name, tensor in full_tensors.items():
            packed = self._source.packed.get(name)
            if packed is None:
                stored[name] = tensor
                continue
            expert = task.mapping.expert
            is_unchanged = self._is_unchanged(name, tensor, expert)
            parts = {entry.name: self._source.stored[entry.name] for entry in packed.sources}
            if expert is not None:
                parts = {part: values[expert] for part, values in parts.items()}
            if not is_unchanged:
                parts |= packed.encode(tensor, stored=parts)
            stored |= parts
            with self._lock:
                self.unchanged[name] = self.unchanged.get(name, True) and is_unchanged
        return stored

    def copied(self) -> Mapping[str, Tensor]:
        """Return scales of activations and caches, which only inference uses."""
        return {name: self._source.stored[name] for name in self._source.beside_weights}

    def _is_unchanged(self, name: str, tensor: Tensor, expert: int | None) -> bool:
        """Return whether a tensor is what the source stands for, in its dtype or rounded to the source's."""
        index = () if expert is None else (expert,)
        tensor = tensor.detach().cpu()
        published = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._source.copy(name, index, published)
        if torch.equal(published, tensor):
            return True
        rounded = published.to(self._source.entries[name].dtype).to(tensor.dtype)
        return torch.equal(rounded, tensor)


@dataclass(frozen=True)
class Quantization:
    """What a caller of an export asks for.

    Args:
        name: one of ``WRITTEN_FORMATS``, ``source``, or ``trained`` for what ``model.qat`` was.
        group_size: how many neighbors share a scale; None takes the format's.
        keep_high: patterns of Hugging Face names that stay in full, besides embeddings, routers, heads and norms.
    """

    name: str
    group_size: int | None = None
    keep_high: tuple[str, ...] = ()

    @classmethod
    def of_keywords(
        cls, name: str | None, group_size: int | None, keep_high: Sequence[str]
    ) -> "Quantization | None":
        """Return what the keywords of ``AutoBridge`` ask for; refuse those that have no effect."""
        if name in (None, AS_SOURCE, AS_TRAINED):
            for option, value in (("group_size", group_size), ("keep_high", keep_high)):
                if value:
                    raise UserError(
                        f"{option}={value!r} has no effect with quantize={name!r}: leave it out, or name a format"
                    )
        if name is None:
            return None
        if name not in (AS_SOURCE, AS_TRAINED):
            ToFormat(name, group_size, keep_high)  # refuses wrong values now
        return cls(name, group_size, tuple(keep_high))

    def quantizer(
        self, source: SafetensorsCheckpoint | None, model_type: str | None, provider: Any
    ) -> "ToFormat | AsSource":
        """Return what quantizes the weights of one export.

        Args:
            source: the weights that the export imitates.
            model_type: ``model_type`` of the Hugging Face config.
            provider: that of the model.
        """
        if self.name == AS_SOURCE:
            return AsSource(source)
        if self.name == AS_TRAINED:
            return _as_trained(provider, model_type)
        return ToFormat(self.name, self.group_size, self.keep_high, model_type)


def format_for(name: str, model_type: str | None) -> WrittenFormat:
    """Return how a format is written for models of ``model_type``."""
    row = written_format(name)
    return MXFP4_EXPERTS if name == "mxfp4" and model_type == "gpt_oss" else row


def can_hold(row: WrittenFormat, mapping: MegatronParamMapping) -> bool:
    """Return whether a format can hold the matrices of a parameter with this mapping."""
    if row is MXFP4_EXPERTS or mapping.is_stacked:
        return mapping.is_stacked and row.stacked_as is not None
    return not mapping.transposed


def _as_trained(provider: Any, model_type: str | None) -> ToFormat:
    """Return what stores the matrices that training rounded, in the format that it rounded them to."""
    trained_for: str | None = getattr(provider, "qat", None)
    if trained_for is None:
        raise UserError(
            "quantize='trained' is for a model that was trained with model.qat, and this one was not: name a format"
        )
    return ToFormat(
        trained_for,
        provider.qat_group_size,
        model_type=model_type,
        is_rounded=lambda name: is_rounded(name, provider),
    )


def _modules_of_matrices(exported: Specs, quantized: Iterable[str]) -> list[str]:
    """Return the modules whose matrices stay in full, which readers must be told."""
    of_quantized = {name.removesuffix(".weight") for name in quantized}
    modules = [
        name.removesuffix(".weight")
        for name, (_, shape) in exported.items()
        if name.endswith(".weight") and len(shape) > 1
    ]
    in_full = [module for module in modules if module not in of_quantized]
    has_head = any(module.endswith("lm_head") for module in in_full)
    return in_full if has_head else [*in_full, "lm_head"]


def _refuse_invalid(full_tensors: Mapping[str, Tensor], quantized: Iterable[str]) -> None:
    for name in quantized:
        if name in full_tensors and not full_tensors[name].isfinite().all():
            raise UserError(
                f"tensor {name} has values that are NaN or infinite, which cannot be quantized: export it in full with "
                f"--keep-high '{name}', or use an earlier checkpoint"
            )
