# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Profiles of a few steps: PyTorch traces, Nsight Systems, the GPU memory history.

Steps ``profile_step_start + 1`` to ``profile_step_end`` are profiled, with the numbers of the log. Each profiled
rank writes a separate file, which gets its final name when it is complete. ``megatron-bridge trace merge``
merges the traces of a run into one.
"""

import json
import socket
import time
from contextlib import ExitStack
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
from megatron.bridge.utils import distributed
from megatron.bridge.utils.atomic import published_file, refuse_unwritable
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.profiler_traces import METADATA_KEY, TRACES_DIR, trace_name

_MEMORY: Any = torch.cuda.memory  # its documented functions start with an underscore


class Profiling(Callback):
    """Starts profiling before the first profiled step reads its data; ``StopProfiling`` stops it."""

    def __init__(self, config: ConfigContainer) -> None:
        assert config.profiling is not None, "profiling is not configured"
        self.config = config.profiling
        self._folder = Path(config.logger.log_dir or ".") / TRACES_DIR
        ranks = self.config.profile_ranks
        self._here = not ranks or distributed.rank() in ranks
        self._ranges = _StepRanges(self.config)
        self._started = False  # equal on all ranks, like `open`, because ranks synchronize
        self.open = False
        self._profilers: list[_PyTorchTrace | _NsysCapture] = []
        self._memory = _MemoryHistory(self.config)

    def on_train_start(self, context: Run) -> None:
        """Start the memory history now: most memory is allocated in the first steps."""
        config = self.config
        if config.record_memory_history and context.progress.step < config.profile_step_end:
            self.open = True
            if self._here:
                self._memory.start(context)

    def on_train_step_start(self, context: Run) -> None:
        config = self.config
        done = context.progress.step
        if config.profile_step_start <= done < config.profile_step_end:
            if not self._started:
                self._start(context)
            self._ranges.begin_step(done + 1)

    def on_grads_ready(self, context: Run) -> None:
        self._ranges.begin_optimizer()

    def on_train_step_end(self, context: Run) -> None:
        self._ranges.end()

    def on_error(self, context: Run, error: BaseException) -> None:
        """Write the profiles: the memory history of a failed allocation shows what filled the memory."""
        try:
            self._ranges.end()
            self.stop(context)
        except Exception as other:  # must not hide the original error
            print_rank_0(f"profile: it cannot be written ({other})")

    def _start(self, context: Run) -> None:
        self._started = self.open = True
        distributed.barrier()
        torch.cuda.synchronize()
        met = (
            time.time_ns()
        )  # on all ranks, also those that are not profiled: since 1970 by this machine's clock
        if self._here and self.config.use_nsys_profiler:
            self._profilers.append(_NsysCapture(self.config))
        if self._here and self.config.use_pytorch_profiler:
            self._profilers.append(_PyTorchTrace(self.config, met))
        for profiler in self._profilers:
            profiler.start(context)

    def stop(self, context: Run) -> None:
        """Stop the profilers and write their files; a second call does nothing."""
        self.open = False
        profilers = self._profilers
        self._profilers = []
        if self._memory.running:
            profilers = [*profilers, self._memory]
        for profiler in profilers:
            with refuse_unwritable(str(self._folder), "choose another logger.log_dir"):
                path = profiler.stop(context, self._folder)
            if path is not None:
                print_rank_0(f"profile: wrote {path}")


class StopProfiling(Callback):
    """Stops ``profiling``, as a separate callback so that the time to write files does not count as step time."""

    def __init__(self, profiling: Profiling) -> None:
        self._profiling = profiling

    def on_train_step_end(self, context: Run) -> None:
        if context.progress.step >= self._profiling.config.profile_step_end:
            self._stop(context)

    def on_train_end(self, context: Run) -> None:
        self._stop(context)  # the run may end before the last profiled step

    def _stop(self, context: Run) -> None:
        if self._profiling.open:
            on_every_rank(
                lambda: self._profiling.stop(context)
            )  # if one rank cannot write, all ranks stop


class _PyTorchTrace:
    """A trace in Chrome's format for Perfetto: ``traces/steps_11-12/rank_0.pt.trace.json.gz``."""

    def __init__(self, config: ProfilingConfig, met: int) -> None:
        self._config = config
        self._met = met
        self._first = 0
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = profile(
            activities=activities, record_shapes=config.record_shapes, acc_events=True
        )

    def start(self, run: Run) -> None:
        self._first = run.progress.step + 1
        self._profiler.start()

    def stop(self, run: Run, folder: Path) -> Path:
        torch.cuda.synchronize()
        steps = (self._first, max(run.progress.step, self._first))
        about = {
            "rank": distributed.rank(),
            "name": process_name(),
            "host": socket.gethostname(),
            "met_ns": self._met,
            "ranks": self._config.profile_ranks or list(range(distributed.world_size())),
            "steps": steps,
        }
        self._profiler.add_metadata_json(
            METADATA_KEY, json.dumps(about)
        )  # no effect once it has stopped
        self._profiler.stop()
        path = folder / "steps_{}-{}".format(*steps) / trace_name(distributed.rank())
        path.parent.mkdir(parents=True, exist_ok=True)
        with published_file(path) as aside:
            self._profiler.export_chrome_trace(str(aside))
        return path


class _NsysCapture:
    """Opens the capture range of ``nsys profile --capture-range=cudaProfilerApi``."""

    def __init__(self, config: ProfilingConfig) -> None:
        # emits a range for each operator, with its name and input shapes
        self._operators: Any = torch.autograd.profiler.emit_nvtx(record_shapes=True)
        self._shapes = config.record_shapes

    def start(self, run: Run) -> None:
        torch.cuda.profiler.start()
        if self._shapes:
            self._operators.__enter__()

    def stop(self, run: Run, folder: Path) -> None:
        """Stop; nsys writes the file itself."""
        if self._shapes:
            self._operators.__exit__(None, None, None)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class _MemoryHistory:
    """Every GPU allocation with its stack, for https://docs.pytorch.org/memory_viz."""

    def __init__(self, config: ProfilingConfig) -> None:
        self._path = config.memory_snapshot_path
        self.running = False

    def start(self, run: Run) -> None:
        _MEMORY._record_memory_history()
        self.running = True

    def stop(self, run: Run, folder: Path) -> Path:
        """Write a snapshot of the allocations since the start."""
        self.running = False
        given = Path(self._path or folder / "memory.pickle")
        path = given.with_name(f"{given.stem}_rank_{distributed.rank()}{given.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        _MEMORY._dump_snapshot(str(path))
        _MEMORY._record_memory_history(enabled=None)
        return path


class _StepRanges:
    """Ranges around each profiled step and its two phases, in the trace and for nsys."""

    def __init__(self, config: ProfilingConfig) -> None:
        self._nvtx = config.nvtx_ranges
        self._open: list[ExitStack] = []

    def begin_step(self, step: int) -> None:
        if self._nvtx:
            core_utils.configure_nvtx_profiling(
                True
            )  # Megatron-Core's own ranges inside the layers
        self._push(f"step {step}")
        self._push("forward-backward")

    def begin_optimizer(self) -> None:
        if self._open:
            self._open.pop().close()
            self._push("optimizer")

    def end(self) -> None:
        while self._open:
            self._open.pop().close()
        if self._nvtx:
            core_utils.configure_nvtx_profiling(False)

    def _push(self, name: str) -> None:
        part = ExitStack()
        part.enter_context(record_function(name))
        if self._nvtx:
            part.enter_context(cast(Any, torch.cuda.nvtx).range(name))
        self._open.append(part)


def process_name() -> str:
    """The name of this rank with its parallel ranks: ``rank 3 (tp1 pp0 dp1)``."""
    state = cast(Any, parallel_state)
    places = {
        "tp": (state.get_tensor_model_parallel_rank(), 0),
        "pp": (state.get_pipeline_model_parallel_rank(), 0),
        "dp": (state.get_data_parallel_rank(), 0),
        "cp": (state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        "ep": (
            state.get_expert_model_parallel_rank(),
            state.get_expert_model_parallel_world_size(),
        ),
    }
    shown = [f"{name}{rank}" for name, (rank, size) in places.items() if size != 1]
    return f"rank {distributed.rank()} ({' '.join(shown)})"
