# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Everything that conversion says to other ranks; the rest of the package never touches ``torch.distributed``."""

from typing import Any, cast

import torch
import torch.distributed as torch_dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.bridge.utils import dist

Group = torch_dist.ProcessGroup | None


def shard_group(megatron_param: str) -> Group:
    """The group over which a parameter is cut; None in a process without model parallelism."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    if ".experts." in megatron_param:
        return cast(Group, parallel_state.get_expert_tensor_parallel_group())
    return tensor_group()


def tensor_group() -> Group:
    """The tensor-parallel group of everything but experts."""
    return cast(Group, parallel_state.get_tensor_model_parallel_group())


def rank_and_size(group: Group) -> tuple[int, int]:
    """Place in ``group`` and its size; (0, 1) without a group."""
    return (0, 1) if group is None else (torch_dist.get_rank(group), torch_dist.get_world_size(group))


def stage() -> int:
    """This rank's pipeline stage."""
    return rank_and_size(pipeline_group())[0]


def pipeline_group() -> Group:
    """The ranks that hold the other pipeline stages of this rank's model replica."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return cast(Group, parallel_state.get_pipeline_model_parallel_group())


def is_first_replica() -> bool:
    """Whether this rank holds the first data- and context-parallel copy of its part of the model."""
    if not parallel_state.model_parallel_is_initialized():
        return True
    return bool(cast(int, parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0)


def all_stages[T](value: T) -> list[T]:
    """The values of all pipeline stages, in order."""
    group = pipeline_group()
    return [value] if group is None else dist.all_gather_object(value, group)


def all_gather(tensor: Tensor, group: Group, parts: int) -> list[Tensor]:
    """The shards of all ``parts`` ranks; just ``tensor`` when it is whole."""
    if parts == 1:
        return [tensor]
    local = tensor.detach().contiguous()
    shards = [torch.empty_like(local) for _ in range(parts)]
    cast(Any, torch_dist).all_gather(shards, local, group=group)
    return shards


def gather(tensor: Tensor, group: Group, parts: int, receiver: int) -> list[Tensor] | None:
    """The shards of all ``parts`` ranks on the rank ``receiver`` of the group, None on the others."""
    if parts == 1:
        return [tensor] if rank_and_size(group)[0] == receiver else None
    assert group is not None
    local = tensor.detach().contiguous()
    mine = torch_dist.get_rank(group) == receiver
    shards = [torch.empty_like(local) for _ in range(parts)] if mine else None
    torch_dist.gather(local, shards, group=group, group_dst=receiver)
    return shards


def from_stage(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, owner: int) -> Tensor:
    """A tensor that the pipeline stage ``owner`` holds, on all stages."""
    group = pipeline_group()
    if rank_and_size(group)[1] == 1:
        assert tensor is not None
        return tensor
    assert group is not None
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
    tensor = tensor.contiguous()
    torch_dist.broadcast(tensor, group=group, group_src=owner)
    return tensor
