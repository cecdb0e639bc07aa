# SPDX-License-Identifier: Apache-2.0
"""The weights that a trainer sends: first names, shapes and dtypes, then the tensors in the same order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from megatron.bridge.backends.fsdp import sharded_rows
from megatron.bridge.models.conversion.adapters import peft_format
from megatron.bridge.models.conversion.adapters.adapted_layers import AdaptedModule
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.engine import buckets
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, WeightConversionTask
from megatron.bridge.models.conversion.mappings.base import Unjoined
from megatron.bridge.models.conversion.model_bridge import bridge_for
from megatron.bridge.utils.distributed import rank, reduce_numbers
from megatron.bridge.utils.errors import UserError

BUCKET_BYTES = 64 << 20  # bytes that ranks exchange at a time


@dataclass(frozen=True)
class WeightInfo:
    """A tensor that will be sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightStream:
    """The Hugging Face tensors of a model in training, which can be sent repeatedly.

    A tensor that is tied to another one is sent once, under the first name. Every rank of the model creates a stream;
    only its creation and iteration communicate. ``dtype`` converts floating-point tensors; None keeps their dtypes.
    Ranks exchange ``bucket_bytes`` at a time.
    """

    def __init__(
        self,
        bridge: AutoBridge,
        model: Any,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._bridge = bridge
        self._model = model
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._plan = peft_format.merging(bridge.plan(model))
        self._hashes: dict[str, str] = {}
        self._new: dict[str, str] = {}

    def metadata(self, tasks: Sequence[WeightConversionTask] | None = None) -> list[WeightInfo]:
        """Return names, shapes and dtypes of ``tasks`` (default: all) in iteration order; does not communicate."""
        if tasks is None:
            return list(self._all)
        return [
            info for task, names in _completed_tensors(tasks) for info in self._infos(task, names)
        ]

    @cached_property
    def _all(self) -> list[WeightInfo]:
        return self.metadata(self._plan.tasks)

    def _infos(self, task: WeightConversionTask, names: Sequence[str]) -> Iterator[WeightInfo]:
        shapes = task.hf_shapes
        dtype = (
            self._dtype if self._dtype is not None and task.dtype.is_floating_point else task.dtype
        )
        for name in names:
            yield WeightInfo(name, shapes[name], dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.send()

    def send(
        self, tasks: Sequence[WeightConversionTask] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the order of ``metadata`` on every rank; all ranks must iterate.

        ``tasks`` is the result of ``changed``; None means all.

        Raises:
            UserError: a tensor differs from its metadata, because its mapping computes another shape.
        """
        named: Any = self._bridge.export_hf_weights(
            self._model,
            show_progress=False,
            conversion_tasks=self._plan.tasks if tasks is None else tasks,
            bucket_bytes=self._bucket_bytes,
            weight_dtype=self._dtype,
        )
        for info, (name, weight) in zip(self.metadata(tasks), named, strict=True):
            _check_tensor(info, name, weight, weight.dtype == info.dtype)
            yield name, weight

    def writes(
        self, tasks: Sequence[WeightConversionTask] | None = None
    ) -> Iterator[Callable[[Tensor], None]]:
        """Yield functions that copy the tensors, in the order of ``metadata``, to a destination on rank 0.

        They copy and convert directly from the shards, and are valid until the next one is requested. Other ranks must
        also iterate, and ignore the values. Arguments and errors are those of ``send``.
        """
        hook = bridge_for(self._bridge.hf_config)
        if hook.computes_on_export:
            for _, weight in self.send(tasks):
                yield partial(_put_weight, weight)
            return
        plan = ConversionPlan(tuple(self._plan.tasks if tasks is None else tasks))
        named = buckets.to_first_rank(plan, self._bucket_bytes)
        if rank() != 0:
            yield from (partial(_put_weight, weight) for _, weight in named)
            return
        for info, (name, weight) in zip(self.metadata(tasks), named, strict=True):
            _check_tensor(info, name, weight)
            yield partial(_put_weight, weight)

    def changed(self) -> list[WeightConversionTask]:
        """Return the tasks whose parameter, on any rank, differs from the last ``mark_sent``.

        Each rank hashes its parameters before any communication. A parameter with an adapter always counts as changed.
        All ranks must call this.
        """
        tasks = self._plan.tasks
        self._new = {
            task.global_param_name: _hash_part(task)
            for task in tasks
            if task.param_weight is not None
        }
        flags = [self._differs(task) for task in tasks]
        anywhere = [bool(flag) for flag in reduce_numbers(flags, "MAX")]
        names = {
            name
            for task, flag in zip(tasks, anywhere, strict=True)
            if flag
            for name in task.mapping.hf_names
        }
        return [task for task in tasks if names.intersection(task.mapping.hf_names)]

    def _differs(self, task: WeightConversionTask) -> bool:
        if isinstance(task.megatron_module, AdaptedModule):
            return True
        name = task.global_param_name
        return name in self._new and self._new[name] != self._hashes.get(name)

    def mark_sent(self) -> None:
        """Record that the receiver has the values that ``changed`` returned last."""
        self._hashes |= self._new


def _check_tensor(info: WeightInfo, name: str, weight: Any, same_dtype: bool = True) -> None:
    if (name, tuple(weight.shape)) != (info.name, info.shape) or not same_dtype:
        raise UserError(
            f"tensor {name} is {list(weight.shape)} {weight.dtype}, but the metadata says {info.name} "
            f"{list(info.shape)} {info.dtype}: export the model to files instead"
        )


@torch.no_grad()
def _put_weight(weight: Tensor | Unjoined, target: Tensor) -> None:
    buckets.put(weight, target)


def _completed_tensors(
    tasks: Sequence[WeightConversionTask],
) -> Iterator[tuple[WeightConversionTask, list[str]]]:
    """Yield each exported task with the tensors that are complete after it."""
    missing: dict[str, int] = {}
    for task in tasks:
        if task.is_copy:
            continue
        if not task.mapping.is_stacked:
            yield task, list(task.hf_slice_shapes)
            continue
        complete: list[str] = []
        experts: int = task.shard.config.num_moe_experts
        for name in task.hf_slice_shapes:
            missing[name] = missing.get(name, experts) - 1
            complete += [] if missing[name] else [name]
        yield task, complete


@torch.no_grad()
def _hash_part(task: WeightConversionTask) -> str:
    """Return a hash of this rank's part of a parameter."""
    assert task.param_weight is not None
    local = sharded_rows.local_rows(task.param_weight).detach().contiguous().cpu()
    return xxhash.xxh3_128_hexdigest(local.flatten().view(torch.uint8).numpy())
