# SPDX-License-Identifier: Apache-2.0
"""Rank helpers that also work before or without ``torch.distributed``."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from megatron.bridge.utils import torchrun_env
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.torchrun_env import adopt_slurm_step


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the global rank: from the process group, else from torchrun's environment, else 0."""
    return dist.get_rank() if is_initialized() else torchrun_env.read_number("RANK", 0)


def world_size() -> int:
    """Return the number of processes: from the process group, else from torchrun's environment, else 1."""
    return dist.get_world_size() if is_initialized() else torchrun_env.read_number("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return the rank on this machine, from torchrun's environment, else 0."""
    return torchrun_env.read_number("LOCAL_RANK", 0)


def initialize(
    backend: str | None = None, timeout_minutes: float = 10.0, store: dist.Store | None = None
) -> None:
    """Join the default process group if needed: torchrun's or srun's, or a group of this process alone.

    ``backend`` is ``nccl`` or ``gloo``; None chooses NCCL if there is a GPU. A collective waits ``timeout_minutes``
    for a rank; the ranks find each other through ``store``, if given, instead of torchrun's address.
    """
    if is_initialized():
        return
    adopt_slurm_step()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(gpu_of_rank(local_rank(), torch.cuda.device_count()))
    rendezvous: dict[str, Any] = {}
    if "RANK" not in os.environ:  # a single process needs neither a port nor a launcher
        rendezvous = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif store is None:
        torchrun_env.check_environment()
    else:
        rendezvous = {"store": store, "rank": rank(), "world_size": world_size()}
    dist.init_process_group(
        backend or ("nccl" if cuda else "gloo"),
        timeout=timedelta(minutes=timeout_minutes),
        **rendezvous,
    )


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank of a default process group that sends nothing, with torch's backend ``fake``."""
    # registers the backend, which ships with torch
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # pyright: ignore

    dist.init_process_group(
        "fake", store=cast(Any, dist.HashStore()), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def gpu_of_rank(local_rank: int, visible: int) -> int:
    """Return the index of a rank's GPU among the visible GPUs: all, or its own (``srun --gpus-per-task=1``)."""
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise UserError(
            f"LOCAL_RANK={local_rank}, but this process sees only {visible} GPUs: start at most {visible} "
            "processes on this machine, or show each process one GPU (srun --gpus-per-task=1)"
        )
    return local_rank


def barrier() -> None:
    """Wait for all ranks; without a process group, return at once."""
    if is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def broadcast_object[T](value: T, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return global rank ``src``'s value, any picklable object, on every rank of ``group``."""
    if not is_initialized() or dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src, group=group)
    return box[0]


def all_gather_object[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of ``group``, in rank order."""
    if not is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def group_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in ``group``, of which it is a member; None stands for all ranks."""
    return dist.get_rank(group) if is_initialized() else 0


def reduce_numbers(numbers: Sequence[float], how: Literal["SUM", "MIN", "MAX"]) -> list[float]:
    """Reduce each of ``numbers`` over all ranks in float64."""
    if not is_initialized() or dist.get_world_size() == 1:
        return [float(value) for value in numbers]
    table = torch.tensor(numbers, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(table, op=getattr(dist.ReduceOp, how))
    return table.tolist()


class PendingMaximum:
    """The maximum of all ranks' numbers, computed asynchronously.

    Only ``wait`` synchronizes with the device, and only with work that was queued earlier.
    """

    def __init__(self, value: float) -> None:
        device = torch.cuda.current_device()
        # filled by a kernel: a copy from the host would wait for it
        largest = torch.full((), value, dtype=torch.float64, device=device)
        if world_size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self._number = torch.empty(
            (), dtype=torch.float64, device="cpu", pin_memory=torch.cuda.is_available()
        )
        self._number.copy_(largest, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> float:
        self._copied.synchronize()
        return float(self._number)


def all_ranks_agree(fact: bool) -> bool:
    return bool(reduce_numbers([fact], "MIN")[0])
