# SPDX-License-Identifier: Apache-2.0
"""Profiles of a few steps."""

from dataclasses import dataclass, field


@dataclass
class ProfilingConfig:
    """Profiles of a few steps. Files go to ``traces`` in ``logger.log_dir``."""

    use_pytorch_profiler: bool = False
    """Write a trace of each profiled rank, for Perfetto."""
    use_nsys_profiler: bool = False
    """Open the capture range of ``nsys profile --capture-range=cudaProfilerApi``."""
    profile_step_start: int = 10
    """Start profiling after this step."""
    profile_step_end: int = 12
    """Stop profiling after this step."""
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to profile. An empty list means all."""
    record_shapes: bool = False
    """Record the input shapes of operators."""
    record_memory_history: bool = False
    """Record every GPU allocation with its stack, from the start to ``profile_step_end``. The snapshot is written
    at that step, or when the run fails.
    """
    memory_snapshot_path: str | None = None
    """Snapshot file; ``_rank_N`` is added to its name. None means ``memory.pickle`` in ``traces``."""
    nvtx_ranges: bool = False
    """Add NVTX ranges for steps, forward and backward passes, and Megatron-Core's layers."""
