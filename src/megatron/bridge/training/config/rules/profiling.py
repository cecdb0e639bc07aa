# SPDX-License-Identifier: Apache-2.0
"""Rules on profiling."""

from collections.abc import Iterator

from megatron.bridge.training.config.run_config import RunConfig

TOOLS = ("use_pytorch_profiler", "use_nsys_profiler", "record_memory_history", "nvtx_ranges")


def profiling_has_tool_steps_and_ranks(config: RunConfig, world_size: int) -> Iterator[str]:
    """A profile needs a tool, steps, ranks and a folder."""
    profiling = config.profiling
    if profiling is None:
        return
    first, last, steps = profiling.profile_step_start, profiling.profile_step_end, config.train.train_iters
    if not any(getattr(profiling, tool) for tool in TOOLS):
        yield f"profiling is set, but nothing is profiled: set one of {', '.join(TOOLS)}, or unset profiling"
    if not 0 <= first < last:
        yield (
            f"profiling.profile_step_start={first} and profile_step_end={last}: profile at least one step, for "
            f"example from {max(first, 0)} to {max(first, 0) + 2}"
        )
    if first >= steps:
        yield f"profiling.profile_step_start={first}, but train.train_iters={steps}: begin before the last step"
    strangers = [rank for rank in profiling.profile_ranks if not 0 <= rank < world_size]
    if strangers:
        yield (
            f"profiling.profile_ranks={profiling.profile_ranks}, but the ranks of this run are 0 to "
            f"{world_size - 1}: leave {', '.join(map(str, strangers))} out"
        )


def one_gpu_profiler_at_a_time(config: RunConfig, world_size: int) -> Iterator[str]:
    """The driver allows one profiler of GPU kernels at a time."""
    watchers = [f"profiling.{tool}" for tool in TOOLS[:2] if getattr(config.profiling, tool, False)]
    if config.nvrx_straggler is not None and config.nvrx_straggler.enabled:
        watchers.append("nvrx_straggler")
    if len(watchers) > 1:
        yield (f"{' and '.join(watchers)} watch the GPU's kernels, which only one can at a time: leave all but one out")


def profiles_need_a_folder(config: RunConfig, world_size: int) -> Iterator[str]:
    """A profile without a folder would be lost."""
    profiling = config.profiling
    if profiling is None:
        return
    to_a_file = [tool for tool in ("use_pytorch_profiler", "record_memory_history") if getattr(profiling, tool)]
    if to_a_file and config.logger.log_dir is None:
        yield f"profiling.{to_a_file[0]}=True without a folder: give logger.log_dir or checkpoint.save"
    if profiling.record_shapes and not (profiling.use_pytorch_profiler or profiling.use_nsys_profiler):
        yield "profiling.record_shapes=True has no effect without a profiler: choose one, or remove it"
