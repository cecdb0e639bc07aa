# SPDX-License-Identifier: Apache-2.0
"""Run one rank of a large job in this process: other ranks do not exist, and tensors take no memory.

The messages of a step are recorded in order, with their groups and sizes.
"""

import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.bridge.backends.cpu import device
from megatron.bridge.utils.distributed import fake_group
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.patching import patched


@dataclass
class Traffic:
    """Python objects that ranks exchanged."""

    received: int = 0  # bytes that this rank received


@contextmanager
def one_rank(rank: int, world_size: int) -> Iterator[Traffic]:
    """Be rank ``rank`` of ``world_size``, with torch's backend ``fake``, which sends nothing.

    Tensors of the device are on the meta device. In exchanges of Python objects, every rank returns this rank's
    object, so the exchanges take realistic processor time and memory.
    """
    if device.has_cuda():
        raise UserError(
            "a rehearsal of one rank runs without a GPU, but this process sees one: set CUDA_VISIBLE_DEVICES= "
            "(empty) in its environment"
        )
    traffic = Traffic()
    with fake_group(rank, world_size), _everyone_says_the_same(traffic), _on_meta():
        yield traffic


@contextmanager
def _on_meta() -> Iterator[None]:
    meta = torch.device("meta")
    named = torch.Tensor.type

    def type_of(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Megatron-Core's optimizer accepts only tensors of the GPU."""
        answer = named(tensor, *args, **options)
        return answer.replace("torch.meta.", "torch.cuda.") if isinstance(answer, str) else answer

    with patched(torch.Tensor, type=type_of), device.placed_on(meta), meta:
        yield


def _everyone_says_the_same(traffic: Traffic) -> AbstractContextManager[None]:
    def all_gather_object(gathered: list[Any], value: Any, group: Any = None) -> None:
        data = pickle.dumps(value)
        traffic.received += len(data) * len(gathered)
        gathered[:] = [pickle.loads(data) for _ in gathered]

    def broadcast_object_list(objects: list[Any], *args: Any, **options: Any) -> None:
        """Keep this rank's objects for every sender."""

    return patched(
        dist, all_gather_object=all_gather_object, broadcast_object_list=broadcast_object_list
    )


_KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "recv_": "receive",
}
"""Usual names of torch's operations; an operation without an entry keeps its name, without outer underscores."""


@dataclass(frozen=True)
class Message:
    """A collective, send or receive operation."""

    kind: str
    group: str  # name of the process group
    ranks: int  # number of ranks in the group
    bytes: int  # size of the full tensor: the result of a gather, the input of a reduction


class Messages(TorchDispatchMode):
    """Context manager that appends every message of this process to ``found``.

    Args:
        chosen: The fraction of a mask that is True, which is unknown without memory. Other values that a program
            reads are zero, so nothing overflows and no gradient is clipped.
    """

    def __init__(self, chosen: float = 1.0) -> None:
        super().__init__()
        self.chosen = chosen
        self.found = list[Message]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found.append(_message_of_call(func, args))
        elif func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        elif func is torch.ops.aten.masked_select.default and args[1].is_meta:
            return args[0].new_empty(round(args[1].numel() * self.chosen))
        return func(*args, **(kwargs or {}))


def _message_of_call(func: Any, args: tuple[Any, ...]) -> Message:
    group = next(
        dist.ProcessGroup.unbox(argument)
        for argument in args
        if isinstance(argument, torch.ScriptObject)
    )
    sizes = [
        sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))
        for argument in args
    ]
    name = str(func.overloadpacket.__name__)
    return Message(_KINDS.get(name, name.strip("_")), group.group_desc, group.size(), max(sizes))


@contextmanager
def recorded_messages(chosen: float) -> Iterator[list[Message]]:
    """Record the messages of this process in ``one_rank``; tokens are distributed evenly over the experts."""
    recompute = {
        "checkpoint": _recompute_in_backward,
        "discard_output_and_register_recompute": lambda *_: None,
    }
    with (
        patched(dist, batch_isend_irecv=_one_by_one),
        patched(MoEAlltoAllTokenDispatcher, _maybe_dtoh_and_synchronize=_shared_out),
        patched(CheckpointWithoutOutput, **recompute),
        Messages(chosen) as messages,
    ):
        yield messages.found


def _one_by_one(operations: list[dist.P2POp]) -> list[Any]:
    """Do not combine operations: the fake group does not support it."""
    return [
        operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
        for operation in operations
    ]


def _recompute_in_backward(_: CheckpointWithoutOutput, function: Any, *args: Any) -> Any:
    """Recompute in the backward pass, as Megatron-Core does with Transformer Engine."""
    return tensor_parallel.checkpoint(function, False, *args)


def _shared_out(dispatcher: Any, point: str, tokens_per_expert: Any) -> Any:
    """Set the numbers of tokens that a dispatcher reads, instead of the router's numbers."""
    tokens = dispatcher.num_out_tokens
    experts = dispatcher.num_experts
    local = dispatcher.num_local_experts
    ranks = dispatcher.tp_size * dispatcher.ep_size
    parts = dispatcher.ep_size
    tokens_of_expert = np.full(experts, tokens // experts)
    tokens_of_expert[: tokens % experts] += 1
    local_tokens = tokens_of_expert[:local]
    if ranks > 1:
        dispatcher.input_splits = tokens_of_expert.reshape(parts, local).sum(1)
        dispatcher.output_splits = np.full(parts, local_tokens.sum())
        dispatcher.output_splits_tp = np.full(dispatcher.tp_size, local_tokens.sum() * parts)
    if local > 1:
        counts = torch.tensor(np.tile(local_tokens, (ranks, 1)), device="cpu")
        dispatcher.num_global_tokens_per_local_expert = counts
    return torch.tensor(local_tokens * ranks, device="cpu")
