# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Communication of conversion; no other module of conversion uses ``torch.distributed``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as torch_dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.bridge.utils import distributed

Group = torch_dist.ProcessGroup | None
Tensors = dict[str, Tensor]  # by name


def is_expert(megatron_param: str) -> bool:
    """Return whether a parameter belongs to a single expert."""
    return ".experts." in megatron_param


def shard_group(megatron_param: str) -> Group:
    """Return the group that shards a parameter, or None in a process without model parallelism."""
    return expert_tensor_group() if is_expert(megatron_param) else tensor_group()


def _find_group(find: Callable[..., object]) -> Group:
    return cast(Group, find()) if parallel_state.model_parallel_is_initialized() else None


def tensor_group() -> Group:
    """Return the tensor-parallel group of all parameters except those of experts."""
    return _find_group(parallel_state.get_tensor_model_parallel_group)


def expert_tensor_group() -> Group:
    """Return the ranks that share each expert's matrices."""
    return _find_group(parallel_state.get_expert_tensor_parallel_group)


def rank_and_size(group: Group) -> tuple[int, int]:
    """Return this rank in ``group`` and the size of the group, or (0, 1) without a group."""
    return (
        (0, 1) if group is None else (torch_dist.get_rank(group), torch_dist.get_world_size(group))
    )


def stage() -> int:
    return rank_and_size(pipeline_group())[0]


def expert_rank() -> int:
    return rank_and_size(expert_group())[0]


def expert_group() -> Group:
    """Return the ranks that hold the other experts of this rank's stage; their data-parallel ranks differ."""
    return _find_group(parallel_state.get_expert_model_parallel_group)


def pipeline_group() -> Group:
    """Return the ranks that hold the other pipeline stages of this rank's model replica."""
    return _find_group(parallel_state.get_pipeline_model_parallel_group)


def is_first_replica(megatron_param: str) -> bool:
    """Return whether this rank holds the first data- and context-parallel copy of a parameter.

    Experts have fewer replicas than the rest of the model, on other ranks.
    """
    if not parallel_state.model_parallel_is_initialized():
        return True
    if is_expert(megatron_param):
        return bool(cast(int, parallel_state.get_expert_data_parallel_rank()) == 0)
    return bool(cast(int, parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0)


def all_gather_stages[T](value: T) -> list[T]:
    """Return the values of all pipeline stages in order."""
    group = pipeline_group()
    return [value] if group is None else distributed.all_gather_object(value, group)


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is set on any rank of this rank's model replica."""
    experts = expert_group()
    if experts is not None:
        flag = any(distributed.all_gather_object(flag, experts))
    return any(all_gather_stages(flag))


@dataclass
class Pending[T]:
    """Tensors that other ranks are sending."""

    value: T
    works: tuple[torch_dist.Work, ...] = ()

    def wait(self) -> T:
        for work in self.works:
            work.wait()
        return self.value


def all_gather(tensor: Tensor, group: Group, parts: int) -> list[Tensor]:
    """Return the shards of all ``parts`` ranks, or only ``tensor`` if it is not sharded."""
    return start_all_gather(tensor, group, parts).wait()


def start_all_gather(tensor: Tensor, group: Group, parts: int) -> Pending[list[Tensor]]:
    """Start to gather the shards of all ``parts`` ranks."""
    if parts == 1:
        return Pending([tensor])
    local = tensor.detach().contiguous()
    shards = torch.empty(parts * local.numel(), dtype=local.dtype, device=local.device)
    work = cast(Any, torch_dist).all_gather_into_tensor(
        shards, local.view(-1), group=group, async_op=True
    )
    return Pending(list(shards.view(parts, *local.shape).unbind()), (work,))


def start_gather(
    tensor: Tensor,
    group: Group,
    parts: int,
    receiver: int,
    empty: Callable[..., Tensor] = torch.empty,
) -> Pending[list[Tensor] | None]:
    """Start to gather all shards on one rank by point-to-point sends: ``torch.distributed.gather`` copies more."""
    rank = rank_and_size(group)[0]
    if parts == 1:
        return Pending([tensor] if rank == receiver else None)
    local = tensor.detach().contiguous()
    dist = cast(Any, torch_dist)
    if rank != receiver:
        return Pending(None, (dist.isend(local, group=group, group_dst=receiver),))
    shards = [
        local if part == rank else empty(local.shape, dtype=local.dtype, device=local.device)
        for part in range(parts)
    ]
    works = [
        dist.irecv(shards[part], group=group, group_src=part)
        for part in range(parts)
        if part != rank
    ]
    return Pending(shards, tuple(works))


@dataclass(frozen=True)
class Owner:
    """The ranks of a model replica that hold a parameter."""

    stage: int
    expert_rank: int | None = (
        None  # expert-parallel rank that holds an expert; None if all of them hold the parameter
    )

    @property
    def is_here(self) -> bool:
        return self.stage == stage() and self.expert_rank in (None, expert_rank())


def broadcast_object[T](owner: Owner, value: T) -> T:
    """Broadcast the value of ``owner`` to every rank of the replica."""
    if owner.expert_rank is not None and (experts := expert_group()) is not None:
        value = distributed.all_gather_object(value, experts)[owner.expert_rank]
    return all_gather_stages(value)[owner.stage]


TensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes of tensors by name


def from_owner(
    tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, owner: Owner
) -> Tensor:
    """Broadcast a tensor of ``owner`` to the replica: first within its stage, then to all stages."""
    local_tensors = None if tensor is None else {"": tensor}
    within = start_among_experts(local_tensors, {"": (shape, dtype)}, owner).wait()
    return start_among_stages(within, {"": (shape, dtype)}, owner).wait()[""]


def start_among_experts(
    local_tensors: Tensors | None, outline: TensorSpecs, owner: Owner
) -> Pending[Tensors | None]:
    """Start to send the tensors of ``owner`` to the other expert-parallel ranks of its stage."""
    if owner.expert_rank is None or owner.stage != stage():
        return Pending(local_tensors)
    return _start_broadcast(local_tensors, outline, expert_group(), owner.expert_rank)


def start_among_stages(
    local_tensors: Tensors | None, outline: TensorSpecs, owner: Owner
) -> Pending[Tensors]:
    """Start to send tensors to the other stages; all ranks of ``owner``'s stage hold them."""
    return _start_broadcast(local_tensors, outline, pipeline_group(), owner.stage)


def _start_broadcast(
    tensors: Tensors | None, outline: TensorSpecs, group: Group, owner: int
) -> Pending[Any]:
    rank, size = rank_and_size(group)
    if size == 1:
        assert tensors is not None
        return Pending(tensors)
    assert group is not None
    if rank != owner or tensors is None:
        device = torch.cuda.current_device()
        tensors = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in outline.items()
        }
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    works = [
        torch_dist.broadcast(tensor, group=group, group_src=owner, async_op=True)
        for tensor in tensors.values()
    ]
    return Pending(tensors, tuple(cast(Any, works)))


def start_to_first_expert(
    local_tensors: Tensors | None, outline: TensorSpecs, owner: Owner, empty: Callable[..., Tensor]
) -> Pending[Tensors | None]:
    """Start to send the tensors of ``owner`` to the first expert-parallel rank of its stage."""
    if owner.expert_rank is None or owner.stage != stage():
        return Pending(local_tensors)
    return _start_to_first(local_tensors, outline, expert_group(), owner.expert_rank, empty)


def start_to_first_stage(
    local_tensors: Tensors | None, outline: TensorSpecs, owner: Owner, empty: Callable[..., Tensor]
) -> Pending[Tensors | None]:
    """Start to send tensors of ``owner``'s stage to the first stage."""
    return _start_to_first(local_tensors, outline, pipeline_group(), owner.stage, empty)


def _start_to_first(
    local_tensors: Tensors | None,
    outline: TensorSpecs,
    group: Group,
    owner: int,
    empty: Callable[..., Tensor],
) -> Pending[Any]:
    rank = rank_and_size(group)[0]
    dist = cast(Any, torch_dist)
    if rank == owner:
        assert local_tensors is not None
        sent = [tensor.contiguous() for tensor in local_tensors.values()]
        return Pending(None, tuple(dist.isend(tensor, group=group, group_dst=0) for tensor in sent))
    if rank:
        return Pending(None)
    device = torch.cuda.current_device()
    received = {
        name: empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in outline.items()
    }
    return Pending(
        received,
        tuple(dist.irecv(tensor, group=group, group_src=owner) for tensor in received.values()),
    )
