# SPDX-License-Identifier: Apache-2.0
"""Rules on what is measured and profiled."""

from megatron.bridge.backends.device import has_cuda
from megatron.bridge.training.config import ConfigContainer

TOOLS = ("use_pytorch_profiler", "use_nsys_profiler", "record_memory_history", "nvtx_ranges")
OF_GPUS = TOOLS[1:]


def profiles_are_of_something(config: ConfigContainer, world_size: int) -> str | None:
    """A profile needs a tool, steps, ranks and a folder."""
    profiling = config.profiling
    if profiling is None:
        return None
    first, last, steps = profiling.profile_step_start, profiling.profile_step_end, config.train.train_iters
    if not any(getattr(profiling, tool) for tool in TOOLS):
        return f"profiling is set, but nothing is profiled: set one of {', '.join(TOOLS)}, or unset profiling"
    if not 0 <= first < last:
        return (
            f"profiling.profile_step_start={first} and profile_step_end={last}: profile at least one step, for "
            f"example from {max(first, 0)} to {max(first, 0) + 2}"
        )
    if first >= steps:
        return f"profiling.profile_step_start={first}, but train.train_iters={steps}: begin before the last step"
    strangers = [rank for rank in profiling.profile_ranks if not 0 <= rank < world_size]
    if strangers:
        return (
            f"profiling.profile_ranks={profiling.profile_ranks}, but the ranks of this run are 0 to "
            f"{world_size - 1}: leave {', '.join(map(str, strangers))} out"
        )
    return None


def profilers_exclude_each_other(config: ConfigContainer, world_size: int) -> str | None:
    """The driver lets one program at a time watch its kernels."""
    profiling = config.profiling
    if profiling is None:
        return None
    watchers = [f"profiling.{tool}" for tool in TOOLS[:2] if getattr(profiling, tool)]
    if config.nvrx_straggler is not None and config.nvrx_straggler.enabled:
        watchers.append("nvrx_straggler")
    if len(watchers) < 2:
        return None
    return f"{' and '.join(watchers)} watch the GPU's kernels, which only one can at a time: leave all but one out"


def profiles_are_written(config: ConfigContainer, world_size: int) -> str | None:
    """What has no file, or no profiler that keeps it, would be lost."""
    profiling = config.profiling
    if profiling is None:
        return None
    to_a_file = [tool for tool in ("use_pytorch_profiler", "record_memory_history") if getattr(profiling, tool)]
    if to_a_file and config.logger.log_dir is None:
        return f"profiling.{to_a_file[0]}=True without a folder: give logger.log_dir or checkpoint.save"
    if profiling.record_shapes and not (profiling.use_pytorch_profiler or profiling.use_nsys_profiler):
        return "profiling.record_shapes=True has no effect without a profiler: choose one, or remove it"
    return None


def gpus_are_measured_where_they_are(config: ConfigContainer, world_size: int) -> str | None:
    """Memory, power and kernels of a GPU cannot be watched without one."""
    profiling = config.profiling
    wanted = [f"profiling.{name}" for name in OF_GPUS if profiling is not None and getattr(profiling, name)]
    wanted += ["logger.log_energy"] if config.logger.log_energy else []
    if not wanted or has_cuda():
        return None
    return f"{wanted[0]}=True needs a GPU: leave it out here (profiling.use_pytorch_profiler works everywhere)"


def peaks_are_positive(config: ConfigContainer, world_size: int) -> str | None:
    """Nothing is a share of nothing."""
    peak = config.logger.peak_tflops
    if peak is None or peak > 0:
        return None
    return f"logger.peak_tflops={peak}: give dense bf16 TFLOP/s of one device, above 0, or unset it"
