# SPDX-License-Identifier: Apache-2.0
"""Rules on what a run does about faults."""

from itertools import pairwise

from megatron.bridge.backends.device import has_cuda
from megatron.bridge.training.config import ConfigContainer


def non_persistent_is_whole(config: ConfigContainer, world_size: int) -> str | None:
    """How often, which kind and where belong together."""
    saved = config.checkpoint
    kind, interval = saved.non_persistent_ckpt_type, saved.non_persistent_save_interval
    if (kind is None) != (interval is None):
        return (
            f"checkpoint.non_persistent_ckpt_type={kind} and non_persistent_save_interval={interval}: set both or "
            "none of them"
        )
    if interval is not None and saved.save_interval is not None and interval % saved.save_interval == 0:
        return (
            f"checkpoint.non_persistent_save_interval={interval} has no effect with checkpoint.save_interval="
            f"{saved.save_interval}, which saves at the same steps: make it shorter"
        )
    for wanted in ("global", "local"):
        key = f"non_persistent_{wanted}_ckpt_dir"
        if getattr(saved, key) is not None and kind != wanted:
            return f"checkpoint.{key} is set, but non_persistent_ckpt_type={kind}: set {wanted}, or no folder"
    if kind == "local" and saved.non_persistent_local_ckpt_dir is None:
        return (
            "checkpoint.non_persistent_ckpt_type=local, but non_persistent_local_ckpt_dir is not set: give a "
            "folder that every machine has for itself"
        )
    if kind is not None and saved.save is None:
        return f"checkpoint.non_persistent_ckpt_type={kind}, but checkpoint.save is not set: give a run folder"
    return None


def memory_outlives_the_run(config: ConfigContainer, world_size: int) -> str | None:
    """What lies in memory helps only where the process is not started again."""
    if config.checkpoint.non_persistent_ckpt_type != "in_memory" or config.inprocess_restart is not None:
        return None
    return (
        "checkpoint.non_persistent_ckpt_type=in_memory is of use within one process only, but inprocess_restart "
        "is not set: set it, or use local with a folder in memory such as /dev/shm"
    )


def kernels_are_timed_on_gpus(config: ConfigContainer, world_size: int) -> str | None:
    """The detector hooks into the GPU's driver."""
    straggler = config.nvrx_straggler
    if straggler is None or not straggler.enabled or has_cuda():
        return None
    return "nvrx_straggler needs a GPU: use straggler, which names slow ranks everywhere"


def scores_are_asked_for(config: ConfigContainer, world_size: int) -> str | None:
    """Without a comparison nothing is found."""
    straggler = config.nvrx_straggler
    if straggler is None or straggler.calc_relative_gpu_perf or straggler.calc_individual_gpu_perf:
        return None
    return "nvrx_straggler compares nothing: set calc_relative_gpu_perf or calc_individual_gpu_perf"


def restarts_have_their_times(config: ConfigContainer, world_size: int) -> str | None:
    """A rank is interrupted before it is killed, and killed before the others stop to wait for it."""
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


def simulated_faults_have_a_rank(config: ConfigContainer, world_size: int) -> str | None:
    """A fault in a rank that is not there would never happen."""
    ft = config.ft
    if ft is None or ft.simulated_fault_rank is None or 0 <= ft.simulated_fault_rank < world_size:
        return None
    return f"ft.simulated_fault_rank={ft.simulated_fault_rank}: must lie between 0 and {world_size - 1}"
