# SPDX-License-Identifier: Apache-2.0
"""Measure the speed of a device: matrix products, copies and, with several ranks, all-reduces."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.bridge.backends.cpu.device import has_cuda

_ROUNDS = 5
PATIENCE = 2.0  # maximum seconds for calls of one kind


def matmul_flops(dtype: torch.dtype = torch.bfloat16, size: int | None = None) -> float:
    """Measure operations per second of a square product; None means 8,192 rows on a GPU, 1,024 on a CPU."""
    size = size or (8192 if has_cuda() else 1024)
    a, b = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _fastest_time(lambda: torch.mm(a, b, out=out))


def copy_bandwidth(size: int | None = None) -> float:
    """Measure bytes per second, read and written, of a copy on the device; None: 1 GiB on a GPU, 64 MiB on a CPU."""
    source = _byte_tensor(size)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest_time(lambda: target.copy_(source))


def host_bandwidth(size: int | None = None) -> float:
    """Measure bytes per second from pinned host memory to a GPU, or of a copy on a machine without a GPU."""
    target = _byte_tensor(size)
    source = torch.zeros(len(target), dtype=torch.uint8, device="cpu", pin_memory=has_cuda())
    return source.nbytes / _fastest_time(lambda: target.copy_(source, non_blocking=True))


def all_reduce_bandwidth(size: int | None = None) -> float | None:
    """Measure each rank's bytes per second in a ring all-reduce (NCCL's bus bandwidth); None on one rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return None
    data = _byte_tensor(size).view(torch.float32)
    # every rank makes the same number of calls
    seconds = _fastest_time(lambda: dist.all_reduce(data), patience=None)
    return 2 * (ranks - 1) / ranks * data.nbytes / seconds


def device() -> torch.device:
    return torch.device("cuda" if has_cuda() else "cpu")


def _byte_tensor(size: int | None) -> Tensor:
    return torch.zeros(
        size or (1 << 30 if has_cuda() else 1 << 26), dtype=torch.uint8, device=device()
    )


def _fastest_time(call: Callable[[], object], patience: float | None = PATIENCE) -> float:
    return min(seconds_of(call, patience))


def seconds_of(call: Callable[[], object], patience: float | None = PATIENCE) -> list[float]:
    """Return the seconds of each call after a warmup; if ``patience`` is None, all calls run."""
    call()
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        seconds.append(seconds_of_one(call))
        if patience is not None and sum(seconds) > patience:
            break
    return seconds


def seconds_of_one(call: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if has_cuda() else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start
