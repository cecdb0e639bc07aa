# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Profiles of a few steps: PyTorch's traces, Nsight Systems, the history of GPU memory.

Steps ``profile_step_start + 1`` to ``profile_step_end`` are profiled, as the log counts them. Each profiled rank
writes its own file, under its final name only once it is whole. ``megatron-bridge trace merge`` puts the traces of
a run into one.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core import utils as core_utils
from torch.profiler import ProfilerActivity, profile, record_function

from megatron.bridge.checkpoint.collective import on_every_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer, ProfilingConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.traces import FOLDER, METADATA_KEY, trace_name

_MEMORY: Any = torch.cuda.memory  # its documented functions begin with an underscore


class Profiling(Callback):
    """Starts before a step draws its data; stopped after the step is shown, before it is evaluated or saved."""

    def __init__(self, config: ConfigContainer) -> None:
        assert config.profiling is not None, "profiling is not configured"
        self._config = config.profiling
        self._folder = Path(config.logger.log_dir or ".") / FOLDER
        ranks = self._config.profile_ranks
        self._here = not ranks or dist.rank() in ranks
        self._phases = _Phases(self._config)
        self._begun = False  # this and the next on all ranks alike, because they meet
        self.open = False
        self._tools: list[_Tool] = []
        self._memory = _MemoryHistory(self._config)

    def on_train_start(self, context: Run) -> None:
        """Memory is watched from here on: what fills it is allocated in the first steps."""
        config = self._config
        if config.record_memory_history and context.progress.step < config.profile_step_end:
            self.open = True
            if self._here:
                self._memory.start(context)

    def on_train_step_start(self, context: Run) -> None:
        """Start all tools at the first of the profiled steps."""
        config = self._config
        done = context.progress.step
        if config.profile_step_start <= done < config.profile_step_end:
            if not self._begun:
                self._start(context)
            self._phases.begin(done + 1)

    def on_grads_ready(self, context: Run) -> None:
        """From here on the optimizer works."""
        self._phases.optimizer()

    def on_train_step_end(self, context: Run) -> None:
        """The step is over."""
        self._phases.end()

    def on_error(self, context: Run, error: BaseException) -> None:
        """What filled the memory is best seen where it was full; the other ranks are not needed for it."""
        try:
            self._phases.end()
            self.stop(context)
        except Exception as other:  # the error itself must be seen
            console().print(f"profile: it cannot be written ({other})", markup=False)

    def _start(self, context: Run) -> None:
        self._begun = self.open = True
        met = _meet()  # on all ranks, also those that are not profiled
        if self._here:
            self._tools = _tools(self._config, met)
        for tool in self._tools:
            tool.start(context)

    def stop(self, context: Run) -> None:
        """Write what is there; nothing happens the second time.

        Raises:
            UserError: the folder cannot be written.
        """
        self.open = False
        tools, self._tools = self._tools, []
        if self._memory.running:
            tools = [*tools, self._memory]
        for tool in tools:
            try:
                path = tool.stop(context, self._folder)
            except OSError as error:
                raise UserError(f"{self._folder} cannot be written: {error.strerror}; choose another") from error
            if path is not None:
                console().print(f"profile: {path} is written", markup=False)


class ProfilesWritten(Callback):
    """Stops ``profiling``. A callback of its own: the time that writing takes is none of the step's."""

    def __init__(self, config: ProfilingConfig, profiling: Profiling) -> None:
        self._last, self._profiling = config.profile_step_end, profiling

    def on_train_step_end(self, context: Run) -> None:
        """Behind the last of the profiled steps."""
        if context.progress.step >= self._last:
            self._stop(context)

    def on_train_end(self, context: Run) -> None:
        """A run that ends earlier still leaves what there is."""
        self._stop(context)

    def _stop(self, context: Run) -> None:
        """If one rank cannot write, all ranks stop."""
        if self._profiling.open:
            on_every_rank(lambda: self._profiling.stop(context))


def _meet() -> int:
    """The time at which all ranks are here, in nanoseconds since 1970 by this machine's clock."""
    dist.barrier()
    torch.cuda.synchronize()
    return time.time_ns()


class _Tool:
    """One profiler on this rank."""

    def start(self, run: Run) -> None:
        """Begin."""

    def stop(self, run: Run, folder: Path) -> Path | None:
        """End, and write what was found; what was written."""


def _tools(config: ProfilingConfig, met: int) -> list[_Tool]:
    """None for ranges alone, which a profiler sees that was started by hand."""
    nsys: list[_Tool] = [_Nsys(config)] if config.use_nsys_profiler else []
    return [*nsys, _PyTorchTrace(config, met)] if config.use_pytorch_profiler else nsys


class _PyTorchTrace(_Tool):
    """A trace in Chrome's format, ``traces/steps_11-12/rank_0.json.gz``, which Perfetto shows."""

    def __init__(self, config: ProfilingConfig, met: int) -> None:
        self._config, self._met, self._first = config, met, 0
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = profile(activities=activities, record_shapes=config.record_shapes, acc_events=True)

    def start(self, run: Run) -> None:
        """Begin."""
        self._first = run.progress.step + 1
        self._profiler.start()

    def stop(self, run: Run, folder: Path) -> Path:
        """Write the trace aside, then give it its name."""
        torch.cuda.synchronize()
        steps = (self._first, max(run.progress.step, self._first))
        about = {
            "rank": dist.rank(),
            "name": process_name(),
            "host": socket.gethostname(),
            "met_ns": self._met,
            "ranks": self._config.profile_ranks or list(range(dist.world_size())),
            "steps": steps,
        }
        self._profiler.add_metadata_json(METADATA_KEY, json.dumps(about))  # no effect once it has stopped
        self._profiler.stop()
        path = folder / "steps_{}-{}".format(*steps) / trace_name(dist.rank())
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{os.getpid()}.{path.name}")
        self._profiler.export_chrome_trace(str(aside))
        aside.replace(path)
        return path


class _Nsys(_Tool):
    """Opens the capture range of ``nsys profile --capture-range=cudaProfilerApi``."""

    def __init__(self, config: ProfilingConfig) -> None:
        # names of operators and shapes of their inputs, as ranges of their own
        self._operators: Any = torch.autograd.profiler.emit_nvtx(record_shapes=True)
        self._shapes = config.record_shapes

    def start(self, run: Run) -> None:
        """Begin."""
        torch.cuda.profiler.start()
        if self._shapes:
            self._operators.__enter__()

    def stop(self, run: Run, folder: Path) -> None:
        """End; nsys writes its own file."""
        if self._shapes:
            self._operators.__exit__(None, None, None)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class _MemoryHistory(_Tool):
    """Every allocation on the GPU with its stack, for https://docs.pytorch.org/memory_viz."""

    def __init__(self, config: ProfilingConfig) -> None:
        self._path = config.memory_snapshot_path
        self.running = False

    def start(self, run: Run) -> None:
        """Begin."""
        _MEMORY._record_memory_history()
        self.running = True

    def stop(self, run: Run, folder: Path) -> Path:
        """Write what is allocated, and what was since the start."""
        self.running = False
        given = Path(self._path or folder / "memory.pickle")
        path = given.with_name(f"{given.stem}_rank_{dist.rank()}{given.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        _MEMORY._dump_snapshot(str(path))
        _MEMORY._record_memory_history(enabled=None)
        return path


class _Phases:
    """Ranges around each profiled step and its two halves, in the trace and for nsys."""

    def __init__(self, config: ProfilingConfig) -> None:
        self._nvtx = config.nvtx_ranges
        self._open: list[Any] = []

    def begin(self, step: int) -> None:
        """The step, and its forward and backward passes."""
        if self._nvtx:
            core_utils.configure_nvtx_profiling(True)  # Megatron-Core's own ranges, in its layers
        self._push(f"step {step}")
        self._push("forward-backward")

    def optimizer(self) -> None:
        """Its second half."""
        if self._open:
            self._pop()
            self._push("optimizer")

    def end(self) -> None:
        """Close what is open."""
        while self._open:
            self._pop()
        if self._nvtx:
            core_utils.configure_nvtx_profiling(False)

    def _push(self, name: str) -> None:
        part = record_function(name)
        part.__enter__()
        self._open.append(part)
        if self._nvtx:
            cast(Any, torch.cuda.nvtx).range_push(name)

    def _pop(self) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._open.pop().__exit__(None, None, None)


def process_name() -> str:
    """This rank and its place in the layout: ``rank 3 (tp1 pp0 dp1)``."""
    state = cast(Any, parallel_state)
    places = {
        "tp": (state.get_tensor_model_parallel_rank(), 0),
        "pp": (state.get_pipeline_model_parallel_rank(), 0),
        "dp": (state.get_data_parallel_rank(), 0),
        "cp": (state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        "ep": (state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
    }
    shown = [f"{name}{rank}" for name, (rank, size) in places.items() if size != 1]
    return f"rank {dist.rank()} ({' '.join(shown)})"
