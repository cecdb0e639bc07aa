# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Metrics besides the losses, computed on all ranks at the log interval."""

import math
import resource
import time
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import module
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.fsdp.sharded_rows import local_rows
from megatron.bridge.backends.hardware.device_flops import device_tflops
from megatron.bridge.backends.hardware.energy import EnergyMeter, energy_meter
from megatron.bridge.checkpoint.collective import on_every_rank
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.flops import flops_per_token
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.resolve.data import tuning_parts
from megatron.bridge.training.distillation.student_teacher import pair_of
from megatron.bridge.training.optim.optimizer import megatron_optimizers
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed

Metrics = dict[str, float | int]

_PAGE_SIZE = resource.getpagesize()
_STATM = Path("/proc/self/statm")


class Throughput:
    """Model FLOP/s and MFU.

    Not computed for fine-tuning data: a packed row of several samples needs less than its length suggests.
    """

    def __init__(self, config: ConfigContainer, run: Run) -> None:
        chunks = [unwrap(chunk) for chunk in run.model]
        known = not tuning_parts(config.dataset) and all(isinstance(chunk, LanguageModule) for chunk in chunks)
        teachers = [unwrap(pair.teacher) for chunk in chunks if (pair := pair_of(chunk))]
        self._flops = flops_per_token(chunks, config.dataset.seq_length, teachers) if known else None
        self._peak = config.logger.peak_tflops or device_tflops()

    def __call__(self, tokens_per_second: float) -> Metrics:
        """TFLOP/s per process, and the model FLOP/s utilization (MFU) if the device's peak is known."""
        if self._flops is None:
            return {}
        speed = self._flops * tokens_per_second / distributed.world_size() / 1e12
        return {"TFLOP/s per process": speed} | ({} if self._peak is None else {"MFU": speed / self._peak})


class EnergyUse:
    """Energy that the GPUs used since the last call."""

    def __init__(self, wanted: bool) -> None:
        self._meter: EnergyMeter | None = on_every_rank(energy_meter) if wanted else None
        self._last = 0.0 if self._meter is None else self._meter.joules()
        self._since = time.perf_counter()

    def __call__(self, steps: int) -> Metrics:
        """Joules per step over all ranks, and the mean power of one GPU, including the time between steps."""
        if self._meter is None:
            return {}
        joules, now = self._meter.joules(), time.perf_counter()
        used, seconds = joules - self._last, now - self._since
        self._last, self._since = joules, now
        (total,) = distributed.reduce_numbers([used], "SUM")
        return {"joules per step": total / steps, "watts per GPU": total / distributed.world_size() / seconds}


def memory_metrics() -> Metrics:
    """Memory in GB (10^9 bytes), the maximum over ranks: of tensors on a GPU, of the process without a GPU."""
    if has_cuda():
        cuda = torch.cuda
        sizes = [cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved()]
        return dict(zip(("memory GB", "peak memory GB", "reserved memory GB"), _max_gigabytes(sizes), strict=True))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # /proc exists on Linux only
    now = int(_STATM.read_text().split()[1]) * _PAGE_SIZE if _STATM.exists() else most
    # the kernel updates the maximum with a delay
    return dict(zip(("memory GB", "peak memory GB"), _max_gigabytes([now, max(now, most)]), strict=True))


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
                replicas = 1 if isinstance(weight, DTensor) else copies
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
