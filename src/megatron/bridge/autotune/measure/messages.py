# SPDX-License-Identifier: Apache-2.0
"""Measure messages between the processes of this job."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.bridge.autotune.profile import Samples
from megatron.bridge.backends.hardware import speed
from megatron.bridge.utils import distributed

_CALLS = 25  # of each kind and size; the first call is not counted
_SIZES = [1 << bits for bits in range(12, 25, 2)]  # bytes


def messages() -> dict[str, Samples]:
    """Time collectives in groups of neighboring ranks; all groups of a size run at once."""
    samples: dict[str, Samples] = {}
    size = distributed.world_size()
    rank = distributed.rank()
    for ranks in [ranks for ranks in (2, 4, 8, 16, 32, 64) if ranks <= size]:
        groups = [
            dist.new_group(range(start, start + ranks))
            for start in range(0, size - ranks + 1, ranks)
        ]
        if rank >= len(groups) * ranks:
            continue
        group: Any = groups[rank // ranks]
        for kind, call in _COLLECTIVES.items():
            samples[f"{kind} of {ranks}"] = [
                (float(amount), _time_message(call, amount, group)) for amount in _SIZES
            ]
    return samples


def _time_message(call: Callable[[Tensor, Any], object], size: int, group: Any) -> float:
    """Return the mean seconds of ``call`` on ``size`` bytes.

    A matrix product before each call keeps the device as busy as in training.
    """
    data = torch.ones(size // 4, device=speed.device())
    matrix = torch.randn(384, 384, device=speed.device())
    dist.barrier(group)
    seconds: list[float] = []
    for _ in range(_CALLS):
        torch.mm(matrix, matrix)
        seconds.append(speed.seconds_of_one(lambda: call(data, group)))
    return statistics.mean(seconds[1:])


def _own_part(data: Tensor, group: Any) -> Tensor:
    return data[: len(data) // group.size()].clone()


def _exchange_with_neighbor(data: Tensor, group: Any) -> None:
    """Exchange data between pairs of neighboring ranks."""
    partner = dist.get_global_rank(group, group.rank() ^ 1)
    into = torch.empty_like(data)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, data, partner), dist.P2POp(dist.irecv, into, partner)]
    ):
        work.wait()


_COLLECTIVES: dict[str, Callable[[Tensor, Any], object]] = {
    "all_gather": lambda data, group: dist.all_gather_into_tensor(
        data, _own_part(data, group), group=group
    ),
    "reduce_scatter": lambda data, group: dist.reduce_scatter_tensor(
        _own_part(data, group), data, group=group
    ),
    "all_reduce": lambda data, group: dist.all_reduce(data, group=group),
    "all_to_all": lambda data, group: dist.all_to_all_single(
        torch.empty_like(data), data, group=group
    ),
    "send": _exchange_with_neighbor,
}
