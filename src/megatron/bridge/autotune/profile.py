# SPDX-License-Identifier: Apache-2.0
"""Measured times of kernels and collectives of a machine, which predictions use in place of data sheets.

A profile is a JSON file: the device, versions and date, and samples of an amount (operations or bytes) with its
seconds. A time between two samples is interpolated in log space; beyond the first and the last, the rate of the
nearest one holds.
"""

import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron.bridge.autotune.gpus import Gpu
from megatron.bridge.autotune.time.collectives import AlphaBeta, Group
from megatron.bridge.autotune.time.kernels import Direction, Roofline
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.hardware import speed
from megatron.bridge.utils import distributed, strict_json
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.errors import UserError

Samples = list[tuple[float, float]]
"""Amounts and seconds, by amount."""

Shape = tuple[int, int, int]
"""Tokens, rows and columns of a matrix product."""

_SIZES = [1 << bits for bits in range(12, 25, 2)]  # bytes of a message


@dataclass
class Profile:
    """What was measured."""

    device: str
    dtype: str  # of the matrix products
    memory: int  # bytes of the device
    cores: int  # that the processes share; 0 on a GPU
    processes: int  # that ran at once
    versions: dict[str, str] = field(default_factory=dict[str, str])
    date: str = ""
    shapes: list[tuple[Shape, float]] = field(default_factory=list[tuple[Shape, float]])  # products, seconds
    kernels: dict[str, Samples] = field(default_factory=dict[str, Samples])  # forward, backward attention; moved
    messages: dict[str, Samples] = field(default_factory=dict[str, Samples])  # ``all_gather of 2``: bytes, seconds

    def card(self) -> Gpu:
        """The device as the table of GPUs has it."""
        rate = max(2.0 * math.prod(shape) / seconds for shape, seconds in self.shapes)
        bandwidth = max(amount / seconds for amount, seconds in self.kernels["moved"])
        link = max((size / seconds for found in self.messages.values() for size, seconds in found), default=bandwidth)
        return Gpu(self.memory, rate, 0.0, 0.0, bandwidth, link, link, domain=1 << 20)


def read(path: Path) -> Profile:
    """The profile in a file that ``write`` made."""
    found = strict_json.read(path)
    try:
        profile = Profile(**found)
        profile.shapes = [
            ((int(shape[0]), int(shape[1]), int(shape[2])), float(took)) for shape, took in profile.shapes
        ]
        profile.card()
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"--profile {path} is no profile: write one with `megatron-bridge tune --measure`") from error
    return profile


def write(profile: Profile, path: Path) -> None:
    write_text(path, json.dumps(asdict(profile), indent=1) + "\n")


@dataclass(frozen=True, eq=False, kw_only=True)
class MeasuredKernels(Roofline):
    """Times of a profile, for a job of ``world_size`` processes."""

    profile: Profile
    world_size: int = 1

    @property
    def crowding(self) -> float:
        """Processes for each core: so much longer takes what all of them compute at once."""
        return max(1.0, self.world_size / self.profile.cores) if self.profile.cores else 1.0

    @cached_property
    def _exact(self) -> dict[Shape, float]:
        return dict(self.profile.shapes)

    @cached_property
    def _products(self) -> Samples:
        return sorted((2.0 * math.prod(shape), seconds) for shape, seconds in self._exact.items())

    def matrix(self, tokens: float, rows: int, columns: int, count: int = 1, quantized: bool = True) -> float:
        exact = self._exact.get((int(tokens), rows, columns)) if tokens == int(tokens) else None
        return count * (exact or interpolated(self._products, 2.0 * tokens * rows * columns))

    def attention(self, operations: float, direction: Direction) -> float:
        return interpolated(self._kernel(direction), operations)

    def moved(self, size: float, kernels: int = 1) -> float:
        return interpolated(self._kernel("moved"), size)

    def _kernel(self, name: str) -> Samples:
        return self.profile.kernels[name]

    @property
    def links(self) -> AlphaBeta:
        return MeasuredLinks(self.card, self.profile.messages)


@dataclass(frozen=True, eq=False)
class MeasuredLinks(AlphaBeta):
    """Times of messages by kind and size of the group; of the nearest group that was measured."""

    messages: dict[str, Samples]

    def all_gather(self, size: float, group: Group) -> float:
        return self._time("all_gather", size, group.size)

    def all_reduce(self, size: float, group: Group) -> float:
        return self._time("all_reduce", size, group.size)

    def all_to_all(self, size: float, group: Group) -> float:
        return self._time("all_to_all", size, group.size)

    def send(self, size: float, distance: int) -> float:
        return self._time("send", size, 2)

    def _time(self, kind: str, size: float, ranks: int) -> float:
        if ranks == 1 or not size:
            return 0.0
        known = [int(name.split()[-1]) for name in self.messages if name.startswith(kind)]
        if not known:
            raise UserError(f"the profile has no messages between {ranks} ranks: measure under torchrun")
        nearest = min(known, key=lambda each: abs(math.log(each / ranks)))
        return interpolated(self.messages[f"{kind} of {nearest}"], size)


def interpolated(samples: Sequence[tuple[float, float]], amount: float) -> float:
    """Seconds for ``amount``, between samples by a power law, beyond them at the rate of the nearest.

    Example:
        >>> interpolated([(1.0, 1.0), (4.0, 2.0)], 2.0) == 2**0.5, interpolated([(1.0, 1.0)], 3.0)
        (True, 3.0)
    """
    first, last = samples[0], samples[-1]
    if amount <= first[0]:
        return first[1]  # what a call costs at least
    if amount >= last[0]:
        return last[1] * amount / last[0]
    low, high = next((low, high) for low, high in itertools.pairwise(samples) if amount <= high[0])
    part = math.log(amount / low[0]) / math.log(high[0] / low[0])
    return low[1] * (high[1] / low[1]) ** part


# ------------------------------------------------------------------------------------------------------- measuring


def measure(shapes: Iterable[Shape], length: int, heads: int, width: int, dtype: torch.dtype, budget: float) -> Profile:
    """Measure this machine, on all ranks of the job at once, in about ``budget`` seconds.

    Args:
        shapes: Matrix products, measured from small to large until the time is over.
        length: Tokens of a sequence, for attention.
        heads: Of attention on one rank.
        width: Of a head.
        dtype: Of the products.
        budget: Seconds; each kind is measured at least once.
    """
    end = time.monotonic() + budget
    name = torch.cuda.get_device_name() if has_cuda() else _processor()
    profile = Profile(
        device=name,
        dtype=str(dtype).removeprefix("torch."),
        memory=_memory() // (1 if has_cuda() else distributed.world_size()),
        cores=0 if has_cuda() else len(os.sched_getaffinity(0)),
        processes=distributed.world_size(),
        versions={package: version(package) for package in ("torch", "megatron-core")},
        date=time.strftime("%Y-%m-%d"),
    )
    profile.messages = _messages()
    profile.kernels = _attention(length, heads, width, dtype) | {"moved": _moved(dtype)}
    for shape in sorted(set(shapes), key=math.prod):
        if profile.shapes and time.monotonic() > end:
            break
        profile.shapes.append((shape, _product(shape, dtype)))
    return profile


def _product(shape: Shape, dtype: torch.dtype) -> float:
    tokens, rows, columns = shape
    x, weight = _random(tokens, columns, dtype=dtype), _random(rows, columns, dtype=dtype)
    return _median(lambda: functional.linear(x, weight))


def _attention(length: int, heads: int, width: int, dtype: torch.dtype) -> dict[str, Samples]:
    """Causal attention over a quarter, half and all of the length."""
    found: dict[str, Samples] = {"forward": [], "backward": []}
    for tokens in sorted({max(16, length // 4), max(16, length // 2), length}):
        leaves = [_random(1, heads, tokens, width, dtype=dtype).requires_grad_() for _ in range(3)]
        operations = 2.0 * heads * width * tokens * (tokens + 1)
        run = lambda leaves=leaves: functional.scaled_dot_product_attention(*leaves, is_causal=True)  # noqa: E731
        output = run()
        gradient = torch.ones_like(output)
        found["forward"].append((operations, _median(run)))
        back = lambda output=output, gradient=gradient: output.backward(gradient, retain_graph=True)  # noqa: E731
        found["backward"].append((2.5 * operations, _median(back)))
    return found


def _moved(dtype: torch.dtype) -> Samples:
    """A norm, which reads and writes each number."""
    found: Samples = []
    for rows in (16, 128, 1024, 8192):
        data, weight = _random(rows, 512, dtype=dtype), _random(512, dtype=dtype)
        run = lambda data=data, weight=weight: functional.rms_norm(data, (512,), weight)  # noqa: E731
        found.append((2.0 * data.nbytes, _median(run)))
    return found


def _messages() -> dict[str, Samples]:
    """Collectives of groups of neighbors, in all groups of a size at once."""
    found: dict[str, Samples] = {}
    size, rank = distributed.world_size(), distributed.rank()
    for ranks in [ranks for ranks in (2, 4, 8, 16, 32, 64) if ranks <= size]:
        groups = [dist.new_group(range(start, start + ranks)) for start in range(0, size - ranks + 1, ranks)]
        if rank >= len(groups) * ranks:
            continue
        group: Any = groups[rank // ranks]
        for kind, call in _COLLECTIVES.items():
            found[f"{kind} of {ranks}"] = [(float(amount), _message(call, amount, group)) for amount in _SIZES]
    return found


def _message(call: Callable[[Tensor, Any], object], size: int, group: Any) -> float:
    data = torch.ones(size // 4, device=speed.device())
    dist.barrier(group)
    return _median(lambda: call(data, group), patience=None)


def _all_gather(data: Tensor, group: Any) -> None:
    dist.all_gather_into_tensor(data, data[: len(data) // group.size()].clone(), group=group)


def _send(data: Tensor, group: Any) -> None:
    """Pairs of neighbors send to each other."""
    other = dist.get_global_rank(group, group.rank() ^ 1)
    into = torch.empty_like(data)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, data, other), dist.P2POp(dist.irecv, into, other)]):
        work.wait()


_COLLECTIVES: dict[str, Callable[[Tensor, Any], object]] = {
    "all_gather": _all_gather,
    "all_reduce": lambda data, group: dist.all_reduce(data, group=group),
    "all_to_all": lambda data, group: dist.all_to_all_single(torch.empty_like(data), data, group=group),
    "send": _send,
}


def _median(call: Callable[[], object], patience: float | None = speed.PATIENCE) -> float:
    return statistics.median(speed.seconds_of(call, patience))


def _random(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*sizes, device=speed.device()).to(dtype)


def _memory() -> int:
    if has_cuda():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    """Name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def merged(profiles: Sequence[Profile]) -> Profile:
    """One profile of those of all ranks: the slowest of each message, and the products of the first."""
    messages: dict[str, Samples] = {}
    for name in profiles[0].messages:
        columns = zip(*(each.messages[name] for each in profiles if name in each.messages), strict=True)
        messages[name] = [(column[0][0], max(seconds for _, seconds in column)) for column in columns]
    return replace(profiles[0], messages=messages)
