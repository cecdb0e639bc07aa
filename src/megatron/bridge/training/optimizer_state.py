# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state as a checkpoint holds it: per model parameter, whatever optimizer and layout keep it.

A distributed optimizer keeps flat intervals of parameters. Megatron-Core offers to save those as they are, which
binds a checkpoint to its tensor and pipeline layout, or to gather and reshape them first, which costs 13 to 17 s
and 7 GB for 207M parameters. Neither is needed: an interval of a row-major tensor is a few boxes of that tensor,
and the format stores any boxes. So each rank writes and reads its own part in place, without communication, and
any layout reads what any other wrote.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron.bridge.backends.fully_sharded import Rows, local, stored_dtype
from megatron.bridge.training.optimizer import STATE_NAMES, kind_of, parts

PREFIX = "optimizer.state"
MASTER = "fp32_param"


@dataclass(frozen=True)
class Owned:
    """What this rank keeps of one model parameter.

    Attributes:
        parameter: The model's parameter, or this rank's rows of it.
        start, end: The interval of its flattened elements.
        tensors: State name -> values of that interval.
        instance: None if every data-parallel rank keeps the same, else which copy of the sharded whole this is.
    """

    parameter: torch.Tensor
    start: int
    end: int
    tensors: dict[str, torch.Tensor]
    instance: int | None


@dataclass(frozen=True)
class Box:
    """A box of a tensor, and where its elements begin in the flattened interval that it is part of."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    flat: int


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """The elements ``start`` to ``end`` of a row-major tensor as boxes, at most ``2 * len(shape) - 1`` of them.

    Example:
        >>> [(box.offset, box.size) for box in boxes((4, 3), 2, 10)]
        [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= end:
        return []
    if len(shape) == 1:
        return [Box((start,), (end - start,), 0)]
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # within one row
        return _in_row(shape, last, start, end, 0)
    found = _in_row(shape, first - 1, start, first * row, 0)
    if first < last:
        found.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row - start))
    return found + _in_row(shape, last, last * row, end, last * row - start)


def _in_row(shape: tuple[int, ...], row: int, start: int, end: int, flat: int) -> list[Box]:
    base = row * prod(shape[1:])
    inner = boxes(shape[1:], start - base, end - base)
    return [Box((row, *box.offset), (1, *box.size), flat + box.flat) for box in inner]


def sharded_optimizer_state(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> dict[str, ShardedTensor]:
    """The optimizer's tensors, described for saving or for loading in place.

    Args:
        optimizer: As ``build_optimizer`` made it.
        model_state: The sharded state of its model chunks.
    """
    described = _by_parameter(model_state)
    state: dict[str, ShardedTensor] = {}
    for owned in owned_parameters(optimizer):
        if owned.start == owned.end:
            continue
        for piece in _pieces(described[id(owned.parameter)]):
            for entry in _entries(owned, piece):
                state[f"{entry.key}@{'.'.join(map(str, entry.global_offset))}"] = entry
    return state


def owned_parameters(optimizer: MegatronOptimizer) -> Iterator[Owned]:
    """What this rank keeps, for each of Megatron-Core's three optimizers."""
    for part in parts(optimizer):
        names = STATE_NAMES[kind_of(part)]
        for parameter, main, start, end in _parameters(part):
            state = part.optimizer.state[main]
            tensors = {name: local(state[name]) for name in names if name in state}
            if stored_dtype(parameter) != main.dtype:
                tensors[MASTER] = local(main.data)
            sharded = isinstance(part, DistributedOptimizer)
            instance = part.distributed_optimizer_instance_id if sharded else None
            yield Owned(local(parameter), start, end, tensors, instance)


def _parameters(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, int]]:
    """Model parameter, what the inner optimizer updates in its place, and the interval which that covers."""
    if isinstance(part, DistributedOptimizer) and not cast(Any, part).ddp_config.use_megatron_fsdp:
        yield from _intervals(part)
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for half, single in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(half, single, strict=True):
                yield parameter, main, 0, parameter.numel()
        for group in part.fp32_from_fp32_groups:
            yield from ((parameter, parameter, 0, parameter.numel()) for parameter in group)
    else:
        yield from ((parameter, parameter, 0, local(parameter).numel()) for parameter in part.get_parameters())


def _intervals(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, int]]:
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    group, order = part.model_param_group_index_map[parameter]
                    main = part.optimizer.param_groups[group]["params"][order]
                    yield parameter, main, ranges["param"].start, ranges["param"].end


def _by_parameter(model_state: dict[str, Any]) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    return {
        id(entry.data): entry
        for entry in nested_values(model_state)
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
    }


def _pieces(entry: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]]:
    """The parts of a parameter that lie apart in the checkpoint, with where each begins in the parameter.

    Gate and up projections, for one, are two halves of one parameter.
    """
    if isinstance(entry, ShardedTensor):
        return [(entry, 0)]
    pieces = []
    found: list[Any] = entry.pieces if isinstance(entry, Rows) else list(nested_values(entry.build()))
    for piece in found:
        shared = piece.data.untyped_storage().data_ptr() == entry.data.untyped_storage().data_ptr()
        assert shared, f"{piece.key}: a copy cannot say where it lies in its parameter"
        assert piece.data.is_contiguous(), f"{piece.key}: only splits into whole rows can be saved"
        pieces.append((piece, piece.data.storage_offset() - entry.data.storage_offset()))
    return pieces


def _entries(owned: Owned, piece: tuple[ShardedTensor, int]) -> Iterator[ShardedTensor]:
    """The boxes of one piece that this rank keeps, for each state tensor."""
    shard, begin = piece
    start, end = max(owned.start, begin), min(owned.end, begin + prod(shard.local_shape))
    replica = shard.replica_id
    if owned.instance is not None:
        assert isinstance(replica, tuple), f"{shard.key}: expected replica (pipeline, tensor, data), got {replica}"
        replica = (*replica[:2], owned.instance)
    for box in boxes(tuple(shard.local_shape), start - begin, end - begin):
        first = start - owned.start + box.flat
        for name, values in owned.tensors.items():
            yield _shard(shard, f"{PREFIX}.{name}.{shard.key}", values.view(-1)[first:], box, replica)


def _shard(shard: ShardedTensor, key: str, values: torch.Tensor, box: Box, replica: Any) -> ShardedTensor:
    extra = shard.prepend_axis_num
    offset = tuple(
        outer + inner for outer, inner in zip(shard.global_offset, (*(0,) * extra, *box.offset), strict=True)
    )
    size = (*(1,) * extra, *box.size)
    return replace(
        shard,
        key=key,
        data=values[: prod(size)].view(size),
        dtype=values.dtype,
        local_shape=size,
        global_offset=offset,
        axis_fragmentations=None,  # boxes form no grid; torch checks that they fill the tensor exactly
        prepend_axis_num=0,
        replica_id=replica,
    )
