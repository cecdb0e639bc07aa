# SPDX-License-Identifier: Apache-2.0
"""Rules on restarts and straggler detection."""

from collections.abc import Iterator
from itertools import pairwise

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.training.config.run_config import RunConfig

TIMEOUT_ORDERS = (
    ("soft_timeout", "hard_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)


def nvrx_straggler_needs_a_gpu(config: RunConfig, world_size: int) -> Iterator[str]:
    """The detector times GPU kernels."""
    if config.nvrx_straggler is not None and config.nvrx_straggler.enabled and not has_cuda():
        yield "nvrx_straggler needs a GPU: use straggler, which names slow ranks everywhere"


def nvrx_straggler_compares_something(config: RunConfig, world_size: int) -> Iterator[str]:
    """The detector needs at least one comparison."""
    found = config.nvrx_straggler
    if found is not None and not (found.calc_relative_gpu_perf or found.calc_individual_gpu_perf):
        yield "nvrx_straggler compares nothing: set calc_relative_gpu_perf or calc_individual_gpu_perf"


def inprocess_restart_timeouts_are_ordered(config: RunConfig, world_size: int) -> Iterator[str]:
    """A rank is interrupted before it is killed, and killed before the others stop waiting for it."""
    for order in TIMEOUT_ORDERS if config.inprocess_restart is not None else ():
        values = [getattr(config.inprocess_restart, name) for name in order]
        if any(first >= second for first, second in pairwise(values)):
            found = ", ".join(f"{name}={value:g}" for name, value in zip(order, values, strict=True))
            yield f"inprocess_restart: {found} must grow in this order"


def simulated_fault_rank_exists(config: RunConfig, world_size: int) -> Iterator[str]:
    """A fault in a rank that does not exist would never happen."""
    rank = None if config.ft is None else config.ft.simulated_fault_rank
    if rank is not None and not 0 <= rank < world_size:
        yield f"ft.simulated_fault_rank={rank}: must lie between 0 and {world_size - 1}"
