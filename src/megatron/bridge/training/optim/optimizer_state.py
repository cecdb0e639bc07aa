# SPDX-License-Identifier: Apache-2.0
"""The optimizer state in a checkpoint: stored per model parameter, for any optimizer and parallel sizes.

A distributed optimizer keeps flat intervals of parameters. Megatron-Core can save them unchanged, which ties a
checkpoint to its tensor and pipeline parallel sizes, or gather and reshape them first, which costs 13 to 17 s and
7 GB for 207M parameters. Neither is needed: an interval of a row-major tensor consists of a few rectangular
slices of that tensor, and the format can store any rectangular slices. So each rank writes and reads its own part
in place, without communication, and a checkpoint can be loaded with any parallel sizes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.fsdp.sharded_rows import ShardedRowsFactory, local_rows, stored_dtype
from megatron.bridge.training.config.blocks.optimizer import STATE_NAMES
from megatron.bridge.training.optim.optimizer import megatron_optimizers, optimizer_kind

PREFIX = "optimizer.state"
MASTER = "fp32_param"
REMAINDER = (
    "param_remainder"  # the lower 16 bits of fp32, the upper ones being the bf16 parameter's
)


def saved_state_names(keys: Iterable[str]) -> set[str]:
    """Return which of the tensors of ``STATE_NAMES`` are among the keys of a checkpoint."""
    known = {name for names in STATE_NAMES.values() for name in names}
    saved = {key.split(".")[2] for key in keys if key.startswith(f"{PREFIX}.")}
    return saved & known


def fits_optimizer(optimizer: str, state_names: set[str]) -> bool:
    """Return whether a checkpoint with these tensors in addition to the parameters is of ``optimizer``."""
    needed = set(STATE_NAMES[optimizer])
    # Muon is for matrices, and Adam updates the other parameters
    further = set(STATE_NAMES["adam"]) if optimizer == "muon" else set[str]()
    return needed <= state_names <= needed | further


@dataclass(frozen=True)
class ParameterShard:
    """This rank's shard of the state of one model parameter: an interval of its flattened elements."""

    parameter: torch.Tensor  # the model's parameter, or this rank's rows of it
    start: int
    end: int  # end of the interval, exclusive
    tensors: dict[str, torch.Tensor]  # state name -> values of the interval
    # index of the distributed optimizer instance; None if the state is replicated on data-parallel ranks
    instance: int | None


@dataclass(frozen=True)
class TensorSlice:
    """A rectangular slice of a tensor, as a part of a flattened interval."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    flat: int  # position of its first element in the interval


def tensor_slices(shape: tuple[int, ...], start: int, end: int) -> list[TensorSlice]:
    """Split the elements ``start`` to ``end`` of a row-major tensor into at most ``2 * len(shape) - 1`` slices.

    Example:
        >>> [(part.offset, part.size) for part in tensor_slices((4, 3), 2, 10)]
        [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= end:
        return []
    if len(shape) == 1:
        return [TensorSlice((start,), (end - start,), 0)]
    row = prod(shape[1:])
    first = -(-start // row)
    last = end // row
    if first > last:  # within one row
        return _slices_in_row(shape, last, start, end, 0)
    slices = _slices_in_row(shape, first - 1, start, first * row, 0)
    if first < last:
        slices.append(
            TensorSlice(
                (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row - start
            )
        )
    return slices + _slices_in_row(shape, last, last * row, end, last * row - start)


def _slices_in_row(
    shape: tuple[int, ...], row: int, start: int, end: int, flat: int
) -> list[TensorSlice]:
    base = row * prod(shape[1:])
    inner = tensor_slices(shape[1:], start - base, end - base)
    return [TensorSlice((row, *box.offset), (1, *box.size), flat + box.flat) for box in inner]


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model_state: dict[str, Any]
) -> dict[str, ShardedTensor]:
    """The sharded state dict of the optimizer's tensors, to save or to load in place, from that of its model chunks."""
    described = _by_parameter(model_state)
    state: dict[str, ShardedTensor] = {}
    for shard in parameter_shards(optimizer):
        if shard.start == shard.end:
            continue
        for tensor, begin in _checkpoint_tensors(described[id(shard.parameter)]):
            for entry in _shard_entries(shard, tensor, begin):
                state[f"{entry.key}@{'.'.join(map(str, entry.global_offset))}"] = entry
    return state


def parameter_shards(optimizer: MegatronOptimizer) -> Iterator[ParameterShard]:
    """This rank's shards, for each of Megatron-Core's optimizer classes."""
    by_layer = isinstance(optimizer, LayerWiseDistributedOptimizer)
    for part in megatron_optimizers(optimizer):
        names = STATE_NAMES[optimizer_kind(part)]
        for parameter, main, start, end in _parameter_intervals(part):
            state = part.optimizer.state[main]
            tensors = {name: local_rows(state[name]) for name in names if name in state}
            master = _master(part, main)
            if stored_dtype(parameter) != master.dtype:
                tensors[REMAINDER if master.dtype == torch.int16 else MASTER] = master
            instance = 0 if by_layer else None  # one rank has the state of a parameter
            if isinstance(part, DistributedOptimizer):
                instance = part.distributed_optimizer_instance_id
            yield ParameterShard(local_rows(parameter), start, end, tensors, instance)


def reload_main_weights(optimizer: MegatronOptimizer | None) -> None:
    """Copy loaded weights to the main parameters; fully sharded parameters have no separate ones."""
    if optimizer is not None and not isinstance(
        next(iter(optimizer.get_parameters()), None), DTensor
    ):
        optimizer.reload_model_params()
        for part in megatron_optimizers(optimizer):
            for parameter, main, start, end in _separate_masters(part):
                values = parameter.data.view(-1)[start:end]
                master = _master(part, main)
                main.data.copy_(values.view_as(main))
                _ = master.zero_() if master.dtype == torch.int16 else master.copy_(main)


def copy_loaded_masters(optimizer: MegatronOptimizer) -> None:
    """Make the two copies of main parameters equal where a checkpoint filled one of them."""
    for part in megatron_optimizers(optimizer):
        for parameter, main, *_ in _separate_masters(part):
            master = _master(part, main)
            if stored_dtype(parameter) == master.dtype:
                master.copy_(main)
            elif master.dtype != torch.int16:
                main.data.copy_(master)


def _separate_masters(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, int]]:
    """The intervals of an optimizer whose main parameters have copies, which Megatron-Core does not reload."""
    if (
        isinstance(part.optimizer, HybridDeviceOptimizer)
        or part.config.use_precision_aware_optimizer
    ):
        yield from _parameter_intervals(part)


def _master(part: Any, main: torch.Tensor) -> torch.Tensor:
    """The most exact copy of a main parameter: on the CPU if it is offloaded, or the one that Adam itself keeps."""
    inner = part.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        return cast(Any, inner).param_to_inner_param[main].data
    return local_rows(inner.state[main].get("master_param", main).data)


def _parameter_intervals(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, int]]:
    """Each model parameter, the main parameter that the inner optimizer updates, and its interval."""
    if isinstance(part, DistributedOptimizer) and not cast(Any, part).ddp_config.use_megatron_fsdp:
        yield from _distributed_intervals(part)
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for half, single in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(half, single, strict=True):
                yield parameter, main, 0, parameter.numel()
        for group in part.fp32_from_fp32_groups:
            yield from ((parameter, parameter, 0, parameter.numel()) for parameter in group)
    else:
        yield from (
            (parameter, parameter, 0, local_rows(parameter).numel())
            for parameter in part.get_parameters()
        )


def _distributed_intervals(
    part: DistributedOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, int]]:
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


def _checkpoint_tensors(
    entry: ShardedTensor | ShardedTensorFactory,
) -> list[tuple[ShardedTensor, int]]:
    """The tensors that a parameter (gate and up projection, say) is split into, with the offset of each in it."""
    if isinstance(entry, ShardedTensor):
        return [(entry, 0)]
    tensors: list[Any] = (
        entry.shards
        if isinstance(entry, ShardedRowsFactory)
        else list(nested_values(entry.build()))
    )
    for tensor in tensors:
        shared = tensor.data.untyped_storage().data_ptr() == entry.data.untyped_storage().data_ptr()
        assert shared, f"{tensor.key}: a copy has no offset in its parameter"
        assert tensor.data.is_contiguous(), (
            f"{tensor.key}: only splits into complete rows can be saved"
        )
    return [
        (tensor, tensor.data.storage_offset() - entry.data.storage_offset()) for tensor in tensors
    ]


def _shard_entries(
    shard: ParameterShard, tensor: ShardedTensor, begin: int
) -> Iterator[ShardedTensor]:
    """The slices of one checkpoint tensor that this rank has, for each state."""
    start = max(shard.start, begin)
    end = min(shard.end, begin + prod(tensor.local_shape))
    replica = tensor.replica_id
    if shard.instance is not None:
        assert isinstance(replica, tuple), (
            f"{tensor.key}: replica is {replica}, not (pipeline, tensor, data)"
        )
        replica = (*replica[:2], shard.instance)
    for part in tensor_slices(tuple(tensor.local_shape), start - begin, end - begin):
        first = start - shard.start + part.flat
        for name, values in shard.tensors.items():
            yield _slice_entry(
                tensor, f"{PREFIX}.{name}.{tensor.key}", values.view(-1)[first:], part, replica
            )


def _slice_entry(
    tensor: ShardedTensor, key: str, values: torch.Tensor, part: TensorSlice, replica: Any
) -> ShardedTensor:
    extra = tensor.prepend_axis_num
    inner = (*(0,) * extra, *part.offset)
    offset = tuple(outer + start for outer, start in zip(tensor.global_offset, inner, strict=True))
    size = (*(1,) * extra, *part.size)
    return replace(
        tensor,
        key=key,
        data=values[: prod(size)].view(size),
        dtype=values.dtype,
        local_shape=size,
        global_offset=offset,
        axis_fragmentations=None,  # slices form no grid; torch checks that they fill the tensor exactly
        prepend_axis_num=0,
        replica_id=replica,
    )
