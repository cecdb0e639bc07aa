# SPDX-License-Identifier: Apache-2.0
"""Collect full Hugging Face tensors on every rank for another program, in buckets with bounded memory.

Sending one tensor at a time leaves the network idle between tensors; sending all at once needs memory for the whole
model. Ranks exchange one bucket of tensors at a time and yield its tensors before the next exchange begins.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from megatron.bridge.models.conversion.adapters.adapted_layers import AdaptedModule
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.engine.exchange import Pending
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, WeightConversionTask
from megatron.bridge.models.conversion.mappings.base import Unjoined
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple, MegatronModelBridge
from megatron.bridge.models.hf_pretrained.safetensors_files import SafetensorsCheckpoint
from megatron.bridge.utils.errors import UserError

BUCKET_BYTES = 512 << 20

Weights = dict[str, Tensor]  # Hugging Face tensors by name
Parts = Mapping[str, Tensor | Unjoined]  # the same, where some tensors are not joined yet


def stream(
    bridge: MegatronModelBridge,
    plan: ConversionPlan,
    source: SafetensorsCheckpoint | None = None,
    cpu: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    tasks: Iterable[WeightConversionTask] | None = None,
) -> Iterator[tuple[WeightConversionTask, HFWeightTuple]]:
    """Yield full Hugging Face tensors with their names and tasks, in the order of the model, on every rank.

    A tensor that holds all experts has the task of the last expert.

    Args:
        bridge: the architecture's bridge, whose hook is called.
        plan: the plan of the conversion; every rank must iterate over its own stream.
        source: the checkpoint that the model was loaded from, for the hook.
        cpu: move each tensor to the CPU.
        bucket_bytes: memory that this rank uses in addition to the model, or the size of one tensor if that is larger;
            must be equal on all ranks. It includes the last yielded tensor, but no earlier ones. A tensor that holds
            all experts of a layer needs additional memory.
        tasks: iterates over the tasks of the plan one by one, if the plan's own tasks have no values.
    """
    same_as: dict[str, list[str]] = {}
    for name, same in plan.ties.items():
        same_as.setdefault(same, []).append(name)
    stacks: dict[str, _Stack] = {}
    adapted = any(
        task.merges and isinstance(task.megatron_module, AdaptedModule) for task in plan.tasks
    )
    for bucket in _group_into_buckets(
        plan.tasks if tasks is None else tasks, bucket_bytes, exchange.any_rank(adapted)
    ):
        exchanged: list[Any] = _exchange_bucket(bucket)
        for task in bucket:
            weights = exchanged.pop(0)
            if bridge.computes_on_export:
                weights = bridge.maybe_modify_converted_hf_weight(task, weights, source or {})
            full_tensors = (
                _fill_stacks(task, weights, stacks)
                if task.mapping.is_stacked
                else _take_tensors(weights)
            )
            for name, weight in full_tensors:
                for alias in (name, *same_as.get(name, ())):
                    yield task, HFWeightTuple(alias, weight.cpu() if cpu else weight)
    if stacks:
        raise UserError(
            f"the tasks leave out experts of {', '.join(stacks)}: add the tasks of all experts"
        )


def to_first_rank(
    plan: ConversionPlan, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor | Unjoined]]:
    """Yield the tensors of ``stream`` on rank 0 of the model only; other ranks receive nothing.

    The caller joins tensors that are still in shards, which saves a copy. The bridge's hooks are not called, and the
    plan's ties are omitted. ``bucket_bytes`` is as in ``stream``; half of it is yielded while the other half arrives.
    """
    stacks: dict[str, _Stack] = {}
    adapted = any(
        task.merges and isinstance(task.megatron_module, AdaptedModule) for task in plan.tasks
    )
    for bucket, exchanged in _one_ahead(
        _group_into_buckets(plan.tasks, bucket_bytes // 2, exchange.any_rank(adapted))
    ):
        for task in bucket:
            weights: Any = exchanged.pop(0)
            yield from (
                _fill_stacks(task, weights, stacks)
                if task.mapping.is_stacked
                else _take_tensors(weights)
            )


def _group_into_buckets(
    tasks: Iterable[WeightConversionTask], limit: int, merged: bool
) -> Iterator[list[WeightConversionTask]]:
    """Group tasks whose exchange needs at most ``limit`` bytes; a task with its own communication is alone.

    ``tasks`` are in the order of the model. ``merged``: any rank first merges adapters into weights.
    """
    bucket: list[WeightConversionTask] = []
    held = largest = last = 0
    for task in tasks:
        if task.is_copy:
            continue
        task_bytes = _bytes_of_task(task, merged) if task.mapping.copies else limit
        # joining frees shards one by one, so memory holds one tensor more than the bucket
        if bucket and held + task_bytes + max(largest, task_bytes) > limit:
            yield bucket
            # the caller still holds the last tensor
            bucket = []
            held = last
            largest = 0
        bucket.append(task)
        held = held + task_bytes
        largest = max(largest, task_bytes)
        last = task_bytes
    if bucket:
        yield bucket


def _bytes_of_task(task: WeightConversionTask, merged: bool) -> int:
    """Return the bytes of a task's tensors, or of the shards to join; equal on all ranks."""
    size = task.dtype.itemsize
    shard = task.shard
    joined = sum(math.prod(shape) for shape in task.hf_slice_shapes.values())
    held = math.prod(shard.shape) * (shard.parts + merged)
    return size * max(joined, held)


@torch.no_grad()
def _exchange_bucket(tasks: Sequence[WeightConversionTask]) -> list[Weights]:
    """Return the tensors of each task on every rank: joined by their holders, then sent to other ranks."""
    if not tasks[0].mapping.copies:
        (task,) = tasks
        return [_by_itself(task)]
    arriving = [_start_gather(task) for task in tasks]
    joined: list[Weights | None] = []
    for task in tasks:
        shards = arriving.pop(0)
        joined.append(None if shards is None else task.mapping.join(task.shard, shards.wait()))
    everywhere = [
        exchange.start_among_experts(pending, _tensor_outline(task), task.owner)
        for task, pending in zip(tasks, joined, strict=True)
    ]
    in_stage = [pending.wait() for pending in everywhere]
    sent = [
        exchange.start_among_stages(pending, _tensor_outline(task), task.owner)
        for task, pending in zip(tasks, in_stage, strict=True)
    ]
    return [pending.wait() for pending in sent]


class _Memory:
    """Memory for the shards of one bucket after another: allocating new pages would cost as much as the copy."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def start(self, device: Any) -> None:
        """Start a new bucket in the memory of an earlier bucket."""
        if self._used > len(self._bytes):
            self._bytes = torch.empty(self._used, dtype=torch.uint8, device=device)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        start = self._used
        size = torch.Size(shape).numel() * dtype.itemsize
        self._used += -(-size // 64) * 64
        if self._used > len(self._bytes):
            return torch.empty(shape, dtype=dtype, device=device)
        return self._bytes[start : start + size].view(dtype).view(shape)


def _one_ahead(
    buckets: Iterable[list[WeightConversionTask]],
) -> Iterator[tuple[list[WeightConversionTask], Any]]:
    """Yield each bucket with its tensors on the first rank while the tensors of the next bucket are sent."""
    memories = itertools.cycle((_Memory(), _Memory()))
    before: Any = None
    for bucket in buckets:
        steps = _at_first_rank(bucket, next(memories))
        started = bucket, itertools.chain([next(steps)], steps)
        if before is not None:
            yield before[0], list(before[1])[-1]
        before = started
    if before is not None:
        yield before[0], list(before[1])[-1]


@torch.no_grad()
def _at_first_rank(tasks: Sequence[WeightConversionTask], memory: _Memory) -> Iterator[Any]:
    """Yield the tensors of each task on rank 0; other ranks yield the tensors that pass through them.

    All ranks run the same steps. Each step starts a communication that the next step waits for.
    """
    if not tasks[0].mapping.copies:
        yield None
        yield _exchange_bucket(tasks)
        return
    memory.start(torch.cuda.current_device())
    gathered = [_start_gather(task, memory) for task in tasks]
    if any(task.shard.parts > 1 for task in tasks):
        yield None
    shards = [
        None if pending_shards is None else pending_shards.wait() for pending_shards in gathered
    ]
    held: list[Any] = [
        None if own_shards is None else task.mapping.unjoined(task.shard, own_shards)
        for task, own_shards in zip(tasks, shards, strict=True)
    ]
    for start, crosses, is_on_way in (
        (exchange.start_to_first_expert, attrgetter("owner.expert_rank"), _is_first_shard),
        (exchange.start_to_first_stage, attrgetter("owner.stage"), _is_first_expert),
    ):
        if not any(map(crosses, tasks)):
            continue
        sent = [
            start(_make_contiguous(tensors), _tensor_outline(task), task.owner, memory.empty)
            if crosses(task) and is_on_way(task)
            else Pending(tensors)
            for task, tensors in zip(tasks, held, strict=True)
        ]
        yield None
        held = [tensors.wait() for tensors in sent]
    yield [tensors or {} for tensors in held]


def _is_first_expert(task: WeightConversionTask) -> bool:
    return (task.owner.expert_rank is None or exchange.expert_rank() == 0) and _is_first_shard(task)


def _is_first_shard(task: WeightConversionTask) -> bool:
    return exchange.rank_and_size(exchange.shard_group(task.global_param_name))[0] == 0


def _make_contiguous(weights: Parts | None) -> Weights | None:
    if weights is None:
        return None
    return {name: weight.contiguous() for name, weight in weights.items()}


def _start_gather(task: WeightConversionTask, memory: _Memory | None = None) -> Pending[Any] | None:
    """Start to gather a parameter's shards: on all ranks that hold one, or in the ``memory`` of the first one."""
    if task.param_weight is None:
        return None
    group = exchange.shard_group(task.global_param_name)
    if memory is not None:
        return exchange.start_gather(
            cast(Tensor, task.exported), group, task.shard.parts, 0, memory.empty
        )
    return exchange.start_all_gather(cast(Tensor, task.exported), group, task.shard.parts)


def _tensor_outline(task: WeightConversionTask) -> exchange.TensorSpecs:
    return {name: (shape, task.dtype) for name, shape in task.hf_slice_shapes.items()}


def _by_itself(task: WeightConversionTask) -> Weights:
    """Return the tensors of a mapping that computes and communicates itself."""
    local_weights = task.mapping.megatron_to_hf(task.exported, task.megatron_module)
    described = {
        name: (tuple(weight.shape), weight.dtype) for name, weight in local_weights.items()
    }
    outline = exchange.broadcast_object(task.owner, described)
    return {
        name: exchange.from_owner(local_weights.get(name), shape, dtype, task.owner)
        for name, (shape, dtype) in outline.items()
    }


def _take_tensors(weights: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors; each one is released when the caller asks for the next."""
    for name in list(weights):
        yield name, weights.pop(name)


def put(weight: Tensor | Unjoined, target: Tensor) -> None:
    """Copy a tensor, joined or not, into ``target``."""
    if isinstance(weight, Unjoined):
        weight.write(target)
    else:
        target.copy_(weight)


@dataclass
class _Stack:
    """A tensor of all experts, and the number of experts that are missing."""

    whole: Tensor
    missing: int


def _fill_stacks(
    task: WeightConversionTask, weights: Parts, stacks: dict[str, _Stack]
) -> Iterator[tuple[str, Tensor]]:
    """Copy an expert's part into the tensors of all experts; yield the tensors that are now complete."""
    shapes = task.mapping.hf_shapes(task.shard)
    for name, weight in weights.items():
        if name not in stacks:
            like = weight.like if isinstance(weight, Unjoined) else weight
            stacks[name] = _Stack(like.new_empty(shapes[name]), shapes[name][0])
        stack = stacks[name]
        put(weight, stack.whole[cast(int, task.mapping.expert)])
        stack.missing -= 1
        if not stack.missing:
            yield name, stacks.pop(name).whole
