# SPDX-License-Identifier: Apache-2.0
"""Load a Hugging Face checkpoint: each rank copies its slices directly into its parameters."""

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.fsdp import sharded_rows
from megatron.bridge.backends.low_bit.weight import LowBitWeight
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, WeightConversionTask
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import CopyRange
from megatron.bridge.models.hf_pretrained.quantized_checkpoint import QuantizedCheckpoint
from megatron.bridge.models.hf_pretrained.safetensors_files import SafetensorsCheckpoint, dtype_name
from megatron.bridge.utils import console, distributed
from megatron.bridge.utils.errors import UserError, first_few, first_problems

THREADS = (
    2  # one copies while the other waits for pages; more threads only compete for memory bandwidth
)


def load(
    bridge: MegatronModelBridge,
    plan: ConversionPlan,
    checkpoint: SafetensorsCheckpoint,
    declared_dtype: torch.dtype | None = None,
    allowed_mismatched_params: Sequence[str] | None = None,
) -> None:
    """Load this rank's parameters.

    ``plan`` covers ``checkpoint``. Tensors must have the ``declared_dtype``, or its most common dtype if that is None.
    Parameters that match ``allowed_mismatched_params`` keep their values if shapes differ. Tensors with any other wrong
    shape or dtype are refused in one message before anything is copied.
    """
    tasks = checked(bridge, plan, checkpoint, declared_dtype, allowed_mismatched_params)
    note = InvalidNote()
    with ThreadPoolExecutor(THREADS) as pool:
        for names in pool.map(partial(fill, bridge, checkpoint=checkpoint), tasks):
            note.add(names)


def checked(
    bridge: MegatronModelBridge,
    plan: ConversionPlan,
    checkpoint: SafetensorsCheckpoint,
    declared_dtype: torch.dtype | None = None,
    allowed_mismatched_params: Sequence[str] | None = None,
) -> list[WeightConversionTask]:
    """Return this rank's tasks that can be loaded; see ``load``."""
    tasks = [task for task in plan.tasks if task.param_weight is not None]
    if not bridge.computes_on_load:
        plan, new = _without_new_head(bridge, plan, checkpoint)
        tasks = [task for task in tasks if task.global_param_name not in new]
        tasks = _check_tasks(
            plan, tasks, checkpoint, declared_dtype, allowed_mismatched_params or ()
        )
    _check_ties(plan, checkpoint)
    return tasks


class InvalidNote:
    """Says once which tensor has NaN or infinite values, as soon as the first one is read."""

    def __init__(self) -> None:
        self._is_printed = False

    def add(self, tensors: Sequence[str]) -> None:
        """Take the names of tensors, with their files, that are not finite."""
        if not tensors or self._is_printed:
            return
        self._is_printed = True
        # of any rank, because others may not read this tensor
        sys.stderr.write(
            f"note: {first_few(tensors)} has NaN or infinite values, which are converted as they are; there may be "
            "more such tensors: check the checkpoint\n"
        )


def fill(
    bridge: MegatronModelBridge, task: WeightConversionTask, checkpoint: SafetensorsCheckpoint
) -> list[str]:
    """Load one parameter and release the pages that it was read from.

    Returns:
        The names of its tensors with NaN or infinite values, with their files.
    """
    if isinstance(task.param_weight, DTensor):
        parameter = task.param_weight
        dtype = sharded_rows.stored_dtype(task.param_weight)
        values = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        invalid = fill(bridge, replace(task, param_weight=values), checkpoint)
        sharded_rows.set_local_rows(parameter, values)
        return invalid
    if isinstance(task.param_weight, LowBitWeight):
        return _fill_low_bit(bridge, task, checkpoint)
    # each thread has its own grad mode
    with torch.no_grad():
        if bridge.computes_on_load or not task.mapping.copies:
            _compute_shard(bridge, task, checkpoint)
        else:
            _copy_ranges_of_task(task, checkpoint)
        invalid = _invalid_tensors(task, checkpoint)
    for name, expert in task.mapping.parts:
        if name in checkpoint:
            checkpoint.release(name, expert)
    return invalid


def _fill_low_bit(
    bridge: MegatronModelBridge, task: WeightConversionTask, checkpoint: SafetensorsCheckpoint
) -> list[str]:
    """Load a parameter that is held in few bits; see ``fill``.

    A source in the same format keeps its codes. Values of another format are quantized as they are. Plain weights are
    first rounded to the dtype of the parameter, as in a model that is quantized after it was loaded.
    """
    weight = cast(LowBitWeight, task.param_weight)
    is_packed = isinstance(checkpoint, QuantizedCheckpoint) and all(
        name in checkpoint.packed for name in task.mapping.hf_names
    )
    dtype = torch.float32 if is_packed else weight.dtype
    values = torch.empty(weight.shape, dtype=dtype)
    in_full = replace(task, param_weight=values)
    copies = task.mapping.copies and not bridge.computes_on_load
    source_codes = None
    if is_packed and copies:
        source_codes = _codes_of_source(weight, in_full, cast(QuantizedCheckpoint, checkpoint))
    invalid = fill(bridge, in_full, checkpoint)
    with torch.no_grad():
        if source_codes is None:
            weight.set_values(values)
        else:
            codes, scales = source_codes
            weight.set_codes(codes, scales, of_source=True)
    return invalid


@torch.no_grad()
def _codes_of_source(
    weight: LowBitWeight, task: WeightConversionTask, checkpoint: QuantizedCheckpoint
) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales with exactly the values of the source, or None if the weight's format has none."""
    numbers = torch.zeros(weight.shape)
    scales = torch.ones(weight.shape)
    for piece in task.mapping.copy_ranges(task.shard):
        parts = checkpoint.packed[piece.hf].as_product()
        if parts is None:
            return None
        of_numbers, of_scales = parts
        of_numbers.fill(checkpoint.stored, piece.hf_index, piece.of_shard(numbers))
        of_scales.fill(checkpoint.stored, piece.hf_index, piece.of_shard(scales))
    return weight.low_bit_format.keep(numbers, scales)


def _invalid_tensors(task: WeightConversionTask, checkpoint: SafetensorsCheckpoint) -> list[str]:
    """Return the tensors of a parameter, which has just been copied, that are not finite.

    Both extremes are NaN if any value is. They cost as much as the copy from memory to memory (1 ms for 8 million
    values in bf16), where a sum or ``isfinite`` costs twenty times that.
    """
    parameter = cast(Tensor, task.param_weight)
    is_compared = (
        parameter.is_floating_point() and parameter.itemsize > 1
    )  # 8-bit floats have no order
    if not is_compared or not parameter.numel():
        return []
    smallest, largest = parameter.aminmax()
    if smallest.isfinite() and largest.isfinite():
        return []
    invalid: list[str] = []
    for name in task.mapping.hf_names:
        if name in checkpoint and not checkpoint[name].isfinite().all():
            entries = getattr(checkpoint, "entries", {})  # weights of a trainer are in no file
            invalid.append(f"{name} in {entries[name].file.name}" if name in entries else name)
    return invalid


def _copy_ranges_of_task(task: WeightConversionTask, checkpoint: SafetensorsCheckpoint) -> None:
    """Copy the ranges that both sides share; Megatron's padding becomes zero."""
    parameter = cast(Tensor, task.param_weight)
    copy_ranges = task.mapping.copy_ranges(task.shard)
    for piece in copy_ranges:
        checkpoint.copy(piece.hf, piece.hf_index, piece.of_shard(parameter))
    for start, length in _uncovered_ranges(copy_ranges, task.shard.local):
        parameter.narrow(task.shard.dim, start, length).zero_()


def _uncovered_ranges(copy_ranges: Sequence[CopyRange], local: int) -> list[tuple[int, int]]:
    """Return the ranges (start, length) that no piece covers."""
    gaps: list[tuple[int, int]] = []
    position = 0
    for piece in sorted(copy_ranges, key=lambda piece: piece.target):
        assert piece.target >= position, f"overlapping pieces of {piece.hf}"
        if piece.target > position:
            gaps.append((position, piece.target - position))
        position = piece.target + piece.length
    if position < local:
        gaps.append((position, local - position))
    return gaps


def _compute_shard(
    bridge: MegatronModelBridge, task: WeightConversionTask, checkpoint: SafetensorsCheckpoint
) -> None:
    """Compute the shard from full tensors with the bridge's hook and the mapping's own code."""
    weights = bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, checkpoint)
    local_shard = task.mapping.hf_to_megatron(weights, cast(nn.Module, task.megatron_module))
    parameter = cast(Tensor, task.param_weight)
    if local_shard.shape != parameter.shape:
        raise UserError(
            f"the mapping of {task.global_param_name} returned shape {list(local_shard.shape)} "
            f"for a parameter of shape {list(parameter.shape)}"
        )
    parameter.copy_(local_shard)


def _check_tasks(
    plan: ConversionPlan,
    tasks: list[WeightConversionTask],
    checkpoint: SafetensorsCheckpoint,
    declared_dtype: torch.dtype | None,
    allowed: Sequence[str],
) -> list[WeightConversionTask]:
    """Return the tasks that can be loaded, without those with an allowed mismatch; refuse all others."""
    problems = _wrong_dtypes(plan, checkpoint, declared_dtype)
    skipped: set[str] = set()
    for task in plan.tasks:  # all tasks, so that every rank finds the same problems
        if not (task.mapping.copies or task.mapping.keeps_shapes):
            continue
        for problem in _missing_head_tensors(task, plan, checkpoint) or _wrong_shapes(
            task, checkpoint
        ):
            if any(fnmatch(task.global_param_name, pattern) for pattern in allowed):
                console.console().print(f"not loaded, as allowed: {problem}")
                skipped.add(task.global_param_name)
            else:
                problems.append(problem)
    if problems:
        raise UserError(first_problems(problems))
    return [task for task in tasks if task.global_param_name not in skipped]


def _without_new_head(
    bridge: MegatronModelBridge, plan: ConversionPlan, checkpoint: SafetensorsCheckpoint
) -> tuple[ConversionPlan, set[str]]:
    """Return the plan without a head that the checkpoint's class does not have, and the head's parameters."""
    new: set[str] = set()
    for task in plan.tasks:
        is_new_head = getattr(task.shard.config, "head", None) not in (None, bridge.head)
        names = plan.heads.intersection(task.mapping.hf_names)
        if is_new_head and not names.issubset(checkpoint):
            new.add(task.global_param_name)
    if new:
        text = f"note: {', '.join(sorted(new))} of the new head starts with random weights"
        console.console().print(text, markup=False)
    return replace(
        plan, tasks=tuple(task for task in plan.tasks if task.global_param_name not in new)
    ), new


def _missing_head_tensors(
    task: WeightConversionTask, plan: ConversionPlan, checkpoint: SafetensorsCheckpoint
) -> list[str]:
    """Return the tensors of a head that a checkpoint lacks."""
    return [
        f"the checkpoint has no tensor {name} for the head {task.global_param_name}: add it to "
        "allowed_mismatched_params to keep its initial values"
        for name in task.mapping.hf_names
        if name in plan.heads and name not in checkpoint
    ]


def _wrong_shapes(task: WeightConversionTask, checkpoint: SafetensorsCheckpoint) -> list[str]:
    return [
        f"tensor {name} in {checkpoint.entries[name].file.name} has shape {list(checkpoint.entries[name].shape)}, "
        f"the config requires {list(shape)}"
        for name, shape in task.hf_shapes.items()
        if checkpoint.entries[name].shape != shape
    ]


def _wrong_dtypes(
    plan: ConversionPlan, checkpoint: SafetensorsCheckpoint, declared: torch.dtype | None
) -> list[str]:
    """Return a phrase for each tensor whose dtype cannot hold a weight; note those that lose precision.

    As in transformers, a tensor is converted to the dtype of its parameter. Whole numbers and 8-bit floats are refused:
    they are quantized, and what their values mean is not known.
    """
    problems: list[str] = []
    rounded: list[str] = []
    for task in plan.tasks:
        if not task.mapping.copies:
            continue
        for name in task.mapping.hf_names:
            if name not in checkpoint:
                continue
            entry = checkpoint.entries[name]
            if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
                problems.append(
                    f"tensor {name} in {entry.file.name} is {dtype_name(entry.dtype)}, which holds quantized "
                    "values, but config.json has no quantization_config: download both again"
                )
            elif entry.dtype != task.dtype and not _holds_exactly(
                declared or task.dtype, entry.dtype
            ):
                rounded.append(f"{name} ({dtype_name(entry.dtype)})")
    if rounded and not problems and distributed.rank() == 0:
        model = dtype_name(declared) if declared else "less precise"
        console.console().print(
            f"note: the model is {model}, so {first_few(rounded)} are rounded, as transformers does; `dtype` of "
            "config.json sets the model's dtype",
            markup=False,
        )
    return problems


def _holds_exactly(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether every value of ``stored`` is one of ``dtype``."""
    return torch.promote_types(dtype, stored) == dtype


def _check_ties(plan: ConversionPlan, checkpoint: Mapping[str, Tensor]) -> None:
    for name, same in plan.ties.items():
        if torch.equal(checkpoint[name], checkpoint[same]):
            continue
        if name in plan.copies:
            raise UserError(
                f"tensor {name} differs from {same}, but Megatron-Core treats it as a copy: make them equal, or remove "
                "the layer in the checkpoint and in config.json"
            )
        raise UserError(
            f"tensor {name} differs from {same} though tie_word_embeddings is true: "
            "set tie_word_embeddings to false in config.json, or remove the wrong tensor"
        )
