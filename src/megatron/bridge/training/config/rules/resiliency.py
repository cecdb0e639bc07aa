# SPDX-License-Identifier: Apache-2.0
"""Rules on restarts and straggler detection."""

from itertools import pairwise

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.training.config.run_config import RunConfig


def nvrx_straggler_needs_a_gpu(config: RunConfig, world_size: int) -> str | None:
    """The detector times GPU kernels."""
    straggler = config.nvrx_straggler
    if straggler is None or not straggler.enabled or has_cuda():
        return None
    return "nvrx_straggler needs a GPU: use straggler, which names slow ranks everywhere"


def nvrx_straggler_compares_something(config: RunConfig, world_size: int) -> str | None:
    """The detector needs at least one comparison."""
    straggler = config.nvrx_straggler
    if straggler is None or straggler.calc_relative_gpu_perf or straggler.calc_individual_gpu_perf:
        return None
    return "nvrx_straggler compares nothing: set calc_relative_gpu_perf or calc_individual_gpu_perf"


def inprocess_restart_timeouts_are_ordered(config: RunConfig, world_size: int) -> str | None:
    """A rank is interrupted before it is killed, and killed before the others stop waiting for it."""
    restart = config.inprocess_restart
    if restart is None:
        return None
    orders = (
        ("soft_timeout", "hard_timeout", "barrier_timeout"),
        ("heartbeat_interval", "heartbeat_timeout", "barrier_timeout"),
        ("monitor_process_interval", "heartbeat_timeout"),
        ("monitor_process_interval", "soft_timeout"),
        ("monitor_thread_interval", "soft_timeout"),
        ("progress_watchdog_interval", "soft_timeout"),
    )
    for order in orders:
        values = [getattr(restart, name) for name in order]
        if any(first >= second for first, second in pairwise(values)):
            found = ", ".join(f"{name}={value:g}" for name, value in zip(order, values, strict=True))
            return f"inprocess_restart: {found} must grow in this order"
    return None


def simulated_fault_rank_exists(config: RunConfig, world_size: int) -> str | None:
    """A fault in a rank that does not exist would never happen."""
    ft = config.ft
    if ft is None or ft.simulated_fault_rank is None or 0 <= ft.simulated_fault_rank < world_size:
        return None
    return f"ft.simulated_fault_rank={ft.simulated_fault_rank}: must lie between 0 and {world_size - 1}"
