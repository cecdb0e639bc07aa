# SPDX-License-Identifier: Apache-2.0
"""Measured times of kernels and collectives of a machine, which replace data sheets in predictions.

A profile is a JSON file with the device, the versions, the date, and samples: amounts (operations or bytes) and their
seconds. Between two samples, times are interpolated in log space; outside the samples, the rate of the nearest one
applies.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from megatron.bridge.autotune.efficiency import Direction
from megatron.bridge.autotune.gpus import Gpu
from megatron.bridge.autotune.time.collectives import AlphaBeta, CollectiveGroup
from megatron.bridge.autotune.time.kernels import Roofline
from megatron.bridge.autotune.time.work import Cost, LayerShape
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.errors import UserError

Samples = list[tuple[float, float]]  # amounts and seconds, by amount

Shape = tuple[int, int, int]  # tokens, rows and columns of a matrix product


@dataclass
class Profile:
    device: str
    dtype: str  # of the matrix products
    memory: int  # bytes of the device
    cores: int  # cores that the processes share; 0 on a GPU
    processes: int  # processes that ran at once
    versions: dict[str, str] = field(default_factory=dict[str, str])
    date: str = ""
    shapes: list[tuple[Shape, float]] = field(
        default_factory=list[tuple[Shape, float]]
    )  # products, seconds
    kernels: dict[str, Samples] = field(
        default_factory=dict[str, Samples]
    )  # forward, backward attention; bytes moved
    layers: dict[str, Samples] = field(
        default_factory=dict[str, Samples]
    )  # ``attention forward``: operations, seconds
    messages: dict[str, Samples] = field(
        default_factory=dict[str, Samples]
    )  # ``all_gather of 2``: bytes, seconds

    def card(self) -> Gpu:
        """The device as a row of the table of GPUs."""
        rate = max(2.0 * math.prod(shape) / seconds for shape, seconds in self.shapes)
        bandwidth = max(amount / seconds for amount, seconds in self.kernels["moved"])
        link = max(
            (size / seconds for samples in self.messages.values() for size, seconds in samples),
            default=bandwidth,
        )
        return Gpu(self.memory, rate, 0.0, 0.0, bandwidth, link, link, domain=1 << 20)


def read(path: Path) -> Profile:
    content = strict_json.read(path)
    try:
        profile = Profile(**content)
        profile.shapes = [
            ((int(shape[0]), int(shape[1]), int(shape[2])), float(took))
            for shape, took in profile.shapes
        ]
        profile.card()
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise UserError(
            f"--profile {path} is not a profile: write it with `megatron-bridge tune --measure`"
        ) from error
    return profile


def write(profile: Profile, path: Path) -> None:
    write_text(path, json.dumps(asdict(profile), indent=1) + "\n")


@dataclass(frozen=True, eq=False, kw_only=True)
class MeasuredKernels(Roofline):
    """Kernel times of a profile, for a job of ``world_size`` processes."""

    profile: Profile
    world_size: int = 1

    @property
    def overlaps(self) -> bool:
        return not self.profile.cores

    @property
    def crowding(self) -> float:
        """Processes per core, by which computation slows down if all processes compute at once."""
        return max(1.0, self.world_size / self.profile.cores) if self.profile.cores else 1.0

    @cached_property
    def _exact(self) -> dict[Shape, float]:
        return dict(self.profile.shapes)

    @cached_property
    def _products(self) -> Samples:
        return sorted((2.0 * math.prod(shape), seconds) for shape, seconds in self._exact.items())

    def matrix(
        self, tokens: float, rows: int, columns: int, count: int = 1, quantized: bool = True
    ) -> float:
        exact = self._exact.get((int(tokens), rows, columns)) if tokens == int(tokens) else None
        return count * (exact or interpolated(self._products, 2.0 * tokens * rows * columns))

    def attention(self, operations: float, direction: Direction, seen: float, head: int) -> float:
        return interpolated(self.profile.kernels[direction], operations)

    def moved(self, size: float, kernels: int = 1) -> float:
        return interpolated(self.profile.kernels["moved"], size)

    def measured(self, name: str, operations: float, cost: Cost) -> Cost:
        samples = self.profile.layers.get(name)
        return (
            cost.slowed(interpolated(samples, operations) / cost.compute)
            if samples and cost.compute
            else cost
        )

    def host(self, layer: LayerShape, direction: Direction) -> float:
        return 0.0  # the measured times of layers include Python and autograd

    def slowest(self, world_size: int) -> float:
        return 1.0  # the processes that were measured ran at the same time as others

    @property
    def links(self) -> AlphaBeta:
        return MeasuredLinks(self.card, self.profile.messages)


@dataclass(frozen=True, eq=False)
class MeasuredLinks(AlphaBeta):
    """Times of messages by kind and group size; unmeasured sizes use the nearest measured group size."""

    messages: dict[str, Samples]

    def all_gather(self, size: float, group: CollectiveGroup) -> float:
        return self._time("all_gather", size, group.size)

    def reduce_scatter(self, size: float, group: CollectiveGroup) -> float:
        return self._time("reduce_scatter", size, group.size)

    def all_reduce(self, size: float, group: CollectiveGroup) -> float:
        return self._time("all_reduce", size, group.size)

    def all_to_all(self, size: float, group: CollectiveGroup) -> float:
        return self._time("all_to_all", size, group.size)

    def send(self, size: float, distance: int) -> float:
        return self._time("send", size, 2)

    def _time(self, kind: str, size: float, ranks: int) -> float:
        if ranks == 1 or not size:
            return 0.0
        known = [int(name.split()[-1]) for name in self.messages if name.startswith(kind)]
        if not known:
            raise UserError(
                f"the profile has no messages between {ranks} ranks: measure under torchrun"
            )
        nearest = min(known, key=lambda measured_ranks: abs(math.log(measured_ranks / ranks)))
        return interpolated(self.messages[f"{kind} of {nearest}"], size)


def interpolated(samples: Sequence[tuple[float, float]], amount: float) -> float:
    """Interpolate the seconds for ``amount`` by a power law; outside the samples, use the rate of the nearest one.

    Example:
        >>> interpolated([(1.0, 1.0), (4.0, 2.0)], 2.0) == 2**0.5, interpolated([(1.0, 1.0)], 3.0)
        (True, 3.0)
    """
    first = samples[0]
    last = samples[-1]
    if amount <= first[0]:
        return first[1]  # the minimum cost of a call
    if amount >= last[0]:
        return last[1] * amount / last[0]
    low, high = next((low, high) for low, high in itertools.pairwise(samples) if amount <= high[0])
    part = math.log(amount / low[0]) / math.log(high[0] / low[0])
    return low[1] * (high[1] / low[1]) ** part
