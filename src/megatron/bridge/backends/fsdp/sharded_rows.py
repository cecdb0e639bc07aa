# SPDX-License-Identifier: Apache-2.0
"""Parameters that are sharded by rows, for both FSDP wrappers (`torch_fsdp2` and `megatron_fsdp`).

Ranks keep complete rows of fp32 master weights. A checkpoint holds the tensors in the dtype of the model, described
by the rows of each rank, so a run with any layout can read it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import clip_grads
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_STORED_DTYPE = "fully_sharded_dtype"  # attribute of a parameter: its dtype in a checkpoint
_ROW_RANGES = "fully_sharded_rows"  # the rows of each rank, in rank order
_COMPUTE_COPY = (
    "fully_sharded_copy"  # this rank's rows of the compute weights, if they are a separate copy
)

_mesh_numbers = count()


RowRanges = tuple[range, ...]  # the rows of a parameter that each rank keeps, in rank order


@dataclass(frozen=True)
class ParameterAttributes:
    """Attributes of a parameter that sharding drops: Megatron-Core's, and its dtype in a checkpoint."""

    attributes: dict[str, Any]

    @classmethod
    def of(cls, parameter: Tensor) -> "ParameterAttributes":
        return cls({**vars(parameter), _STORED_DTYPE: parameter.dtype})

    def attach(
        self, parameter: Tensor, ranges: RowRanges, compute_copy: Tensor | None = None
    ) -> None:
        """Set the attributes on the sharded parameter.

        ``ranges`` are the rows of each rank, in rank order. ``compute_copy`` is this rank's rows of the weights that
        the model computes with, if the wrapper keeps them as a separate copy instead of casting the master weights in
        each forward pass.
        """
        vars(parameter).update(self.attributes)
        setattr(parameter, _ROW_RANGES, ranges)
        setattr(parameter, _COMPUTE_COPY, compute_copy)
        assert len(row_range(cast(DTensor, parameter))) == local_rows(parameter).shape[0], (
            "another rank's rows"
        )


def mesh_dim_names(*dimensions: str) -> tuple[str, ...]:
    """Return names for the dimensions of a new mesh that no other mesh of this process has.

    torch takes meshes with the same ranks and names for one mesh and caches what it computed with the first. A mesh
    would then keep the process groups of an earlier one, which may have been destroyed.
    """
    number = next(_mesh_numbers)
    return tuple(f"{dimension}_{number}" for dimension in dimensions)


def local_rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows as a view; a tensor that is not sharded is returned unchanged."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(parameter: Tensor) -> Tensor:
    """Gather a parameter in its checkpoint dtype; a collective over the ranks that share it."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = local_rows(parameter).to(stored_dtype(parameter))
    ranges = _row_ranges(parameter)
    longest = max(map(len, ranges))
    padded = local.new_zeros(longest, *local.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in ranges]
    dist.all_gather(parts, padded, group_of_rows(parameter))
    return torch.cat([part[: len(rows)] for part, rows in zip(parts, ranges, strict=True)])


def group_of_rows(parameter: DTensor) -> dist.ProcessGroup:
    """Return the ranks that hold all rows together; with hybrid sharding, other groups have copies of them."""
    mesh = parameter.device_mesh
    return mesh.get_group(mesh.ndim - 1)


def dense_shards() -> dist.ProcessGroup:
    """Return the ranks that hold all rows of dense weights together: all replicas, or those of one copy."""
    group = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=True
    )
    return cast(dist.ProcessGroup, group)


def expert_shards() -> dist.ProcessGroup:
    """Return the ranks that hold all rows of this rank's experts together."""
    group = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
    return cast(dist.ProcessGroup, group)


def copies() -> dist.ProcessGroup:
    """Return the ranks that hold the same rows with hybrid sharding (``ddp.num_distributed_optimizer_instances``)."""
    return cast(dist.ProcessGroup, parallel_state.get_inter_distributed_optimizer_instance_group())


def ranks_by_copy(replicas: dist.ProcessGroup, shards: dist.ProcessGroup) -> list[list[int]]:
    """Return the ranks of each copy: Megatron-Core takes neighbors."""
    ranks = dist.get_process_group_ranks(replicas)
    size = shards.size()
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def install_norms() -> None:
    """Let Megatron-Core add up norms over the ranks of one copy; its own function knows no copies."""
    clip_grads.get_data_parallel_group_if_dtensor = _group_of_norm


def _group_of_norm(
    tensor: Tensor, known: dist.ProcessGroup | None = None
) -> dist.ProcessGroup | None:
    """Return the ranks over which the norm of ``tensor`` is added up, if it is sharded.

    Args:
        tensor: A gradient.
        known: The ranks of the gradients before, which must be the same.
    """
    if not isinstance(tensor, DTensor):
        return None
    group = group_of_rows(tensor)
    assert known is None or group == known, "the gradients of one norm have different shards"
    return group


def copies_of_rows(parameter: DTensor) -> int:
    """Return how many ranks hold the same rows."""
    return parameter.device_mesh.size() // group_of_rows(parameter).size()


def copy_index(parameter: DTensor) -> int:
    """Return which copy of the rows this rank has; 0 without hybrid sharding."""
    mesh = parameter.device_mesh
    return 0 if mesh.ndim == 1 else mesh.get_local_rank(0)


def set_local_rows(parameter: DTensor, values: Tensor) -> None:
    rows = row_range(parameter)
    local_rows(parameter).copy_(values[rows.start : rows.stop])
    _update_compute_weight(parameter)


def update_compute_weights(chunk: nn.Module) -> None:
    for parameter in chunk.parameters():
        if isinstance(parameter, DTensor):
            _update_compute_weight(parameter)


@torch.no_grad()
def _update_compute_weight(parameter: DTensor) -> None:
    compute_copy = cast(Tensor | None, getattr(parameter, _COMPUTE_COPY))
    if compute_copy is not None:
        compute_copy.copy_(local_rows(parameter))


def stored_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter in a checkpoint; the dtype of its master weights may be wider."""
    return getattr(parameter, _STORED_DTYPE, parameter.dtype)


def row_range(parameter: DTensor) -> range:
    return _row_ranges(parameter)[group_of_rows(parameter).rank()]


def _row_ranges(parameter: DTensor) -> RowRanges:
    return getattr(parameter, _ROW_RANGES)


def sharded_names(chunk: nn.Module) -> set[str]:
    return {name for name, parameter in chunk.named_parameters() if isinstance(parameter, DTensor)}


@dataclass
class ShardedRowsFactory(ShardedTensorFactory):
    """Describe this rank's rows of a parameter for a checkpoint."""

    shards: list[ShardedTensor] = field(default_factory=list[ShardedTensor])
    """Return a view of the rows for each tensor of the checkpoint; gate and up projections are separate."""


@contextmanager
def as_whole_parameters(chunk: nn.Module) -> Iterator[dict[int, DTensor]]:
    """Replace the sharded parameters of ``chunk`` by full-size meta tensors inside the context.

    Its modules then describe full parameters to a checkpoint.

    Yields:
        The sharded parameters by the ids of their replacements.
    """
    with _replaced_parameters(chunk, _meta_parameter) as pairs:
        yield {id(replacement): parameter for parameter, replacement in pairs}


@contextmanager
def gathered(part: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Replace sharded parameters of ``part`` by full ones inside; yield the full ones by the sharded ones' ids."""
    with _replaced_parameters(
        part, lambda parameter: nn.Parameter(whole(parameter), requires_grad=False)
    ) as pairs:
        yield {id(parameter): replacement for parameter, replacement in pairs}


@contextmanager
def _replaced_parameters(
    part: nn.Module, make: Callable[[DTensor], nn.Parameter]
) -> Iterator[list[tuple[DTensor, nn.Parameter]]]:
    """Replace the sharded parameters of ``part`` inside the context, and yield pairs (sharded, replacement)."""
    held = [
        (module, name, parameter)
        for module in part.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    pairs: list[tuple[DTensor, nn.Parameter]] = []
    try:
        for module, name, parameter in held:
            module._parameters[name] = replacement = make(parameter)
            pairs.append((parameter, replacement))
        yield pairs
    finally:
        for module, name, parameter in held:
            module._parameters[name] = cast(nn.Parameter, parameter)


def _meta_parameter(parameter: DTensor) -> nn.Parameter:
    empty = torch.empty(parameter.shape, dtype=stored_dtype(parameter), device="meta")
    replacement = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    vars(replacement).update(vars(parameter))
    return replacement


def keep_local_rows(state: dict[str, Any], parameters: dict[int, DTensor]) -> dict[str, Any]:
    """Reduce a sharded state of full parameters to the rows of this rank.

    Parameters without rows on this rank are left out, because Megatron-Core drops empty entries at loading.
    """
    entries = {name: _local_part(entry, parameters) for name, entry in state.items()}
    return {
        name: entry
        for name, entry in entries.items()
        if not isinstance(entry, ShardedRowsFactory) or entry.shards
    }


def _local_part(entry: Any, parameters: dict[int, DTensor]) -> Any:
    parameter = parameters.get(id(getattr(entry, "data", None)))
    if parameter is None:
        return entry
    local = local_rows(parameter)
    rows = row_range(parameter)
    dtype = stored_dtype(parameter)
    whole = [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))
    row = max(1, prod(parameter.shape[1:]))
    copy = copy_index(parameter)
    local_shards = [
        _local_shard(shard, cast(Tensor, shard.data).storage_offset() // row, local, rows, copy)
        for shard in whole
    ]
    shards = [shard for shard in local_shards if shard is not None]

    def build(*_: Any) -> Any:
        return [
            replace(shard, data=cast(Tensor, shard.data).to(dtype), dtype=dtype) for shard in shards
        ]

    def merge(loaded: Any) -> Tensor:
        for shard, stored in zip(shards, loaded, strict=True):
            master = cast(Tensor, shard.data)
            # keep a master weight from the optimizer state, which rounds to the stored weight
            master.copy_(torch.where(master.to(dtype) == stored, master, stored.float()))
        return local

    return ShardedRowsFactory(
        entry.key, local, cast(Any, build), cast(Any, merge), entry.replica_id, shards=shards
    )


def _local_shard(
    shard: ShardedTensor, begin: int, local: Tensor, rows: range, copy: int
) -> ShardedTensor | None:
    """Return the rows of one shard that this rank keeps.

    Args:
        shard: A shard of the parameter.
        begin: Its first row in the parameter.
        local: This rank's rows of the parameter.
        rows: Which rows these are.
        copy: Which copy of the rows they are: the first one is saved.
    """
    first = max(rows.start, begin)
    end = min(rows.stop, begin + shard.local_shape[0])
    if first >= end:
        return None
    extra = shard.prepend_axis_num
    offset = list(shard.global_offset)
    offset[extra] += first - begin
    shape = (*(1,) * extra, end - first, *shard.local_shape[1:])
    return replace(
        shard,
        data=local[first - rows.start : end - rows.start].view(shape),
        dtype=local.dtype,
        local_shape=shape,
        global_offset=tuple(offset),
        axis_fragmentations=None,
        prepend_axis_num=0,
        replica_id=(*cast(tuple[int, ...], shard.replica_id)[:2], copy),
    )
