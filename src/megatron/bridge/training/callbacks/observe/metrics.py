# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Metrics besides the losses, computed on all ranks at the log interval, and timers of the parts of a step."""

import copy
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import tensor_parallel, utils
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.timers import Timers
from megatron.core.transformer import module
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.fsdp.sharded_rows import copies_of_rows, local_rows
from megatron.bridge.backends.hardware.device_flops import device_tflops
from megatron.bridge.backends.hardware.energy import EnergyMeter, energy_meter
from megatron.bridge.checkpoint.collective import on_every_rank
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.flops import flops_per_token
from megatron.bridge.training.config import ConfigContainer, LoggerConfig
from megatron.bridge.training.config.resolve.data import tuning_parts
from megatron.bridge.training.distillation.student_teacher import pair_of
from megatron.bridge.training.optim.optimizer import megatron_optimizers
from megatron.bridge.training.state import BatchIterator, Run
from megatron.bridge.utils import distributed

Metrics = dict[str, float | int]

_PAGE_SIZE = resource.getpagesize()
_STATM = Path("/proc/self/statm")


class Throughput:
    """Model FLOP/s and MFU; not for fine-tuning data, whose packed rows need less than their length suggests."""

    def __init__(self, config: ConfigContainer, run: Run) -> None:
        chunks = [unwrap(chunk) for chunk in run.model]
        known = not tuning_parts(config.dataset) and all(
            isinstance(chunk, LanguageModule) for chunk in chunks
        )
        teachers = [unwrap(pair.teacher) for chunk in chunks if (pair := pair_of(chunk))]
        self._flops = (
            flops_per_token(chunks, config.dataset.seq_length, teachers) if known else None
        )
        self._peak = config.logger.peak_tflops or device_tflops()

    def __call__(self, tokens_per_second: float) -> Metrics:
        """TFLOP/s per process, and the model FLOP/s utilization (MFU) if the device's peak is known."""
        if self._flops is None:
            return {}
        speed = self._flops * tokens_per_second / distributed.world_size() / 1e12
        return {"TFLOP/s per process": speed} | (
            {} if self._peak is None else {"MFU": speed / self._peak}
        )


class EnergyUse:
    """Energy that the GPUs used since the last call."""

    def __init__(self, measures: bool) -> None:
        self._meter: EnergyMeter | None = on_every_rank(energy_meter) if measures else None
        self._last = 0.0 if self._meter is None else self._meter.joules()
        self._since = time.perf_counter()

    def __call__(self, steps: int) -> Metrics:
        """Joules per step over all ranks, and the mean power of one GPU, including the time between steps."""
        if self._meter is None:
            return {}
        joules = self._meter.joules()
        now = time.perf_counter()
        used = joules - self._last
        seconds = now - self._since
        self._last = joules
        self._since = now
        (total,) = distributed.reduce_numbers([used], "SUM")
        return {
            "joules per step": total / steps,
            "watts per GPU": total / distributed.world_size() / seconds,
        }


def memory_metrics() -> Metrics:
    """Memory in GB (10^9 bytes), the maximum over ranks: of tensors on a GPU, of the process without a GPU."""
    if has_cuda():
        cuda = torch.cuda
        sizes = [cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved()]
        return dict(
            zip(
                ("memory GB", "peak memory GB", "reserved memory GB"),
                _max_gigabytes(sizes),
                strict=True,
            )
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # /proc exists on Linux only
    now = int(_STATM.read_text().split()[1]) * _PAGE_SIZE if _STATM.exists() else peak
    # the kernel updates the maximum with a delay
    return dict(
        zip(("memory GB", "peak memory GB"), _max_gigabytes([now, max(now, peak)]), strict=True)
    )


def _max_gigabytes(sizes: list[int]) -> list[float]:
    return distributed.reduce_numbers([size / 1e9 for size in sizes], "MAX")


@torch.no_grad()
def params_norm(optimizer: MegatronOptimizer) -> float:
    """L2 norm of all trained weights, each counted once under any parallelism.

    The norm is computed from the optimizer's main parameters: they have full precision, and a distributed
    optimizer shards them, so nothing is gathered. Weights that several ranks hold (replicas, weights without
    tensor parallelism, tied embeddings) count once, as for the gradient norm.
    """
    norm = cast(Any, torch.linalg).vector_norm  # untyped
    total: Any = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for part in megatron_optimizers(optimizer):
        copies = distributed.world_size() / part.get_grad_stats_parallel_group().size()
        for weight in part.get_parameters():
            if _is_counted_here(weight, part):
                replicas = copies_of_rows(weight) if isinstance(weight, DTensor) else copies
                total += norm(local_rows(weight), dtype=torch.float32).double() ** 2 / replicas
    return math.sqrt(distributed.reduce_numbers([total.item()], "SUM")[0])


def _is_counted_here(weight: torch.Tensor, part: Any) -> bool:
    groups = (getattr(part, "tp_group", None), getattr(part, "expert_tp_group", None))
    cut = cast(Any, tensor_parallel).param_is_not_tensor_parallel_duplicate
    return cast(Any, module).param_is_not_shared(weight) and cut(weight, *groups)


def loss_scale(run: Run) -> Metrics:
    """The factor that fp16 training multiplies the loss with."""
    if not run.config.model.fp16:
        return {}
    return {"loss scale": cast(Any, run.optimizer).get_loss_scale().item()}


PREFIX = "time/"


class StepTimers:
    """Megatron-Core's timers in its schedules and optimizers; paused during evaluations, which share schedules."""

    def __init__(self, config: LoggerConfig) -> None:
        self._option = config.timing_log_option
        self._level = config.timing_log_level
        self._timers: Any = Timers(self._level, "max") if self._level else None
        self._owners: list[Any] = []

    def attach(self, run: Run) -> None:
        """Set the timers in the configs in which Megatron-Core looks for them."""
        if self._timers is None:
            return
        self._owners = [cast(Any, utils).get_model_config(chunk) for chunk in run.model]
        for optimizer in [cast(Any, run.optimizer), *megatron_optimizers(run.optimizer)]:
            optimizer.config = copy.copy(optimizer.config)  # the original is written to YAML
            self._owners.append(optimizer.config)
        self.resume()

    def pause(self) -> None:
        for owner in self._owners:
            owner.timers = None

    def resume(self) -> None:
        for owner in self._owners:
            owner.timers = self._timers

    def start_optimizer(self) -> None:
        if self._timers is not None:
            self._timers("optimizer", log_level=1).start()

    def stop_optimizer(self) -> None:
        """Stop the timer, unless the step ended before its gradients were ready."""
        if self._timers is not None and self._timers("optimizer", log_level=1)._started:
            self._timers("optimizer").stop()

    def read(self, steps: int) -> Metrics:
        """Seconds per step since the last call, reduced by ``timing_log_option``; to be called on all ranks."""
        if self._timers is None:
            return {}
        own_times = {
            name: timer.elapsed(reset=True) / steps for name, timer in self._timers._timers.items()
        }
        everyone = distributed.all_gather_object(own_times)
        names = dict.fromkeys(
            name for times in everyone for name in times
        )  # stages have different ones
        numbers: Metrics = {}
        for name in names:
            # a pipeline stage that does not run this part has no time for it
            times = {
                rank: rank_times[name]
                for rank, rank_times in enumerate(everyone)
                if rank_times.get(name)
            }
            numbers |= _over_ranks(f"{PREFIX}{name}", times, self._option)
        return numbers


def _over_ranks(name: str, times: dict[int, float], option: str) -> Metrics:
    if not times:
        return {}
    if option == "all":
        return {f"{name} rank {rank}": seconds for rank, seconds in times.items()}
    numbers: Metrics = {name: max(times.values())}
    return numbers | ({f"{name} min": min(times.values())} if option == "minmax" else {})


class DataWait:
    """The time for which a step waits for its data; needs no device synchronization."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._attached = False

    def attach(self, run: Run) -> None:
        """Time the training batches of this rank; call after all callbacks have replaced ``train_batches``."""
        if not self._attached:
            run.train_batches = [self._timed(batches) for batches in run.train_batches]
            self._attached = True

    def _timed(self, batches: BatchIterator) -> Iterator[dict[str, Any]]:
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._seconds += time.perf_counter() - started
            yield batch

    def read(self, steps: int) -> Metrics:
        """Seconds per step since the last call, the maximum over ranks; call on all ranks."""
        seconds = self._seconds / steps
        self._seconds = 0.0
        return {"data wait": distributed.reduce_numbers([seconds], "MAX")[0]}
