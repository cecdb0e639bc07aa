# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Numbers beside the losses, taken at the log interval by all ranks together."""

import resource
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as torch_dist
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import module
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.device import has_cuda
from megatron.bridge.backends.energy import EnergyMeter, energy_meter
from megatron.bridge.backends.fully_sharded import local
from megatron.bridge.backends.peaks import device_tflops
from megatron.bridge.checkpoint.collective import on_every_rank
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.flops import flops_per_token
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.distillation.pair import pair_of
from megatron.bridge.training.optimizer import parts
from megatron.bridge.training.resolve_data import tuning_parts
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist

Numbers = dict[str, float | int]

_PAGE = resource.getpagesize()
_STATUS = Path("/proc/self/statm")


class Speed:
    """Model operations a second, and their share of what the device can do.

    Not for fine-tuning data: rows of several samples are cheaper than their length says.
    """

    def __init__(self, config: ConfigContainer, run: Run) -> None:
        chunks = [unwrap(chunk) for chunk in run.model]
        known = not tuning_parts(config.dataset) and all(isinstance(chunk, LanguageModule) for chunk in chunks)
        teachers = [unwrap(pair.teacher) for chunk in chunks if (pair := pair_of(chunk))]
        self._flops = flops_per_token(chunks, config.dataset.seq_length, teachers) if known else None
        self._peak = config.logger.peak_tflops or device_tflops()

    def __call__(self, tokens_per_second: float) -> Numbers:
        """Of one process: TFLOP/s, and MFU (model FLOP/s utilisation) where the peak is known."""
        if self._flops is None:
            return {}
        speed = self._flops * tokens_per_second / dist.world_size() / 1e12
        return {"TFLOP/s per process": speed} | ({} if self._peak is None else {"MFU": speed / self._peak})


class Energy:
    """Energy that the GPUs have used since they were last asked."""

    def __init__(self, wanted: bool) -> None:
        self._meter: EnergyMeter | None = on_every_rank(energy_meter) if wanted else None
        self._last = 0.0 if self._meter is None else self._meter.joules()
        self._since = time.perf_counter()

    def __call__(self, steps: int) -> Numbers:
        """Of all ranks for each of ``steps``, and the mean power of one GPU; what happens between steps counts."""
        if self._meter is None:
            return {}
        joules, now = self._meter.joules(), time.perf_counter()
        used, seconds = joules - self._last, now - self._since
        self._last, self._since = joules, now
        (total,) = _over_ranks([used], torch_dist.ReduceOp.SUM)
        return {"joules per step": total / steps, "watts per GPU": total / dist.world_size() / seconds}


def memory() -> Numbers:
    """Of the rank that has most, in GB (10^9 bytes): what tensors take, or without a GPU the whole process."""
    if has_cuda():
        cuda = torch.cuda
        sizes = [cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved()]
        return dict(zip(("memory GB", "peak memory GB", "reserved memory GB"), _gigabytes(sizes), strict=True))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    now = int(_STATUS.read_text().split()[1]) * _PAGE if _STATUS.exists() else most  # /proc is Linux's
    # the kernel notes the maximum a little late
    return dict(zip(("memory GB", "peak memory GB"), _gigabytes([now, max(now, most)]), strict=True))


def _gigabytes(sizes: list[int]) -> list[float]:
    return _over_ranks([size / 1e9 for size in sizes], torch_dist.ReduceOp.MAX)


def longest(seconds: float) -> float:
    """Of all ranks."""
    return _over_ranks([seconds], torch_dist.ReduceOp.MAX)[0]


def _over_ranks(values: list[float], how: Any) -> list[float]:
    table: Any = torch.tensor(values, dtype=torch.float64, device=torch.cuda.current_device())
    if dist.world_size() > 1:
        cast(Any, torch_dist).all_reduce(table, op=how)
    return table.tolist()


@torch.no_grad()
def params_norm(optimizer: MegatronOptimizer) -> float:
    """L2 norm of all trained weights, each counted once, whatever the layout.

    Read from the optimizer's own copies: those are in full precision, and with a distributed optimizer each rank
    has a part of them, so that nothing must be gathered. Of what several ranks hold (replicas, weights that are
    not cut, tied embeddings) one counts, the same as for the norm of the gradients.
    """
    norm = cast(Any, torch.linalg).vector_norm  # untyped
    total: Any = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for part in parts(optimizer):
        copies = dist.world_size() / part.get_grad_stats_parallel_group().size()
        for weight in part.get_parameters():
            if _counts(weight, part):
                replicas = 1 if isinstance(weight, DTensor) else copies
                total += norm(local(weight), dtype=torch.float32).double() ** 2 / replicas
    if dist.world_size() > 1:
        cast(Any, torch_dist).all_reduce(total)
    return total.sqrt().item()


def _counts(weight: torch.Tensor, part: Any) -> bool:
    groups = (getattr(part, "tp_group", None), getattr(part, "expert_tp_group", None))
    cut = cast(Any, tensor_parallel).param_is_not_tensor_parallel_duplicate
    return cast(Any, module).param_is_not_shared(weight) and cut(weight, *groups)


def loss_scale(run: Run) -> Numbers:
    """With fp16, what the loss is multiplied with."""
    if not run.config.model.fp16:
        return {}
    return {"loss scale": cast(Any, run.optimizer).get_loss_scale().item()}
