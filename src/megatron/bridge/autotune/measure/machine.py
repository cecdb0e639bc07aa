# SPDX-License-Identifier: Apache-2.0
"""Measure this machine for a model."""

import math
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from megatron.bridge.autotune.measure.kernels import attention, moved, product
from megatron.bridge.autotune.measure.layers import time_layers
from megatron.bridge.autotune.measure.messages import messages
from megatron.bridge.autotune.profile import Profile, Samples, Shape
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils import distributed


def measure(config: ConfigContainer, shapes: Iterable[Shape], budget: float) -> Profile:
    """Measure this machine on all ranks of the job, for about ``budget`` seconds plus the time of the messages.

    On a CPU, only as many ranks compute at once as there are cores; the others wait.

    Args:
        config: A resolved config, which decides layers, attention and the type of the weights.
        shapes: Matrix products, measured from small to large for half of the time.
        budget: Seconds; each kind is measured at least once.
    """
    profile = _empty_profile(config)
    profile.messages = messages()
    if not profile.cores or distributed.rank() < profile.cores:
        _measure_compute(profile, config, shapes, budget)
    distributed.barrier()
    return merged(distributed.all_gather_object(profile))


def _measure_compute(
    profile: Profile, config: ConfigContainer, shapes: Iterable[Shape], budget: float
) -> None:
    model = config.model
    dtype = config.model.resolved().params_dtype
    end = time.monotonic() + budget / 2
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    heads = attention(config.dataset.seq_length, model.num_attention_heads, width, dtype)
    profile.kernels = heads | {"moved": moved(dtype)}
    for shape in sorted(set(shapes), key=math.prod):
        if profile.shapes and time.monotonic() > end:
            break
        profile.shapes.append((shape, product(shape, dtype)))
    profile.layers = time_layers(config, profile.memory, budget / 2)


def _empty_profile(config: ConfigContainer) -> Profile:
    return Profile(
        device=torch.cuda.get_device_name() if has_cuda() else _processor_name(),
        dtype=str(config.model.resolved().params_dtype).removeprefix("torch."),
        memory=_machine_memory() // (1 if has_cuda() else distributed.world_size()),
        cores=0 if has_cuda() else len(os.sched_getaffinity(0)),
        processes=distributed.world_size(),
        versions={package: version(package) for package in ("torch", "megatron-core")},
        date=time.strftime("%Y-%m-%d"),
    )


def _machine_memory() -> int:
    if has_cuda():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def merged(profiles: Sequence[Profile]) -> Profile:
    """Merge the profiles of all ranks: the slowest time of each message, and the products of the first rank."""
    messages: dict[str, Samples] = {}
    for name in profiles[0].messages:
        columns = zip(
            *(profile.messages[name] for profile in profiles if name in profile.messages),
            strict=True,
        )
        messages[name] = [
            (column[0][0], max(seconds for _, seconds in column)) for column in columns
        ]
    return replace(profiles[0], messages=messages)
