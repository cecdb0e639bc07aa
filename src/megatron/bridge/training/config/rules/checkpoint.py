# SPDX-License-Identifier: Apache-2.0
"""Rules on checkpoints (what is saved and loaded, where, and how), on restarts and on straggler detection."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from megatron.bridge.training.config.run_config import RunConfig

_PARALLEL = {"fully_parallel_save": True, "fully_parallel_load": True}


def non_persistent_settings_are_complete(config: RunConfig, world_size: int) -> Iterator[str]:
    """The type, the interval and the folder belong together."""
    saved = config.checkpoint
    kind, interval = saved.non_persistent_ckpt_type, saved.non_persistent_save_interval
    if (kind is None) != (interval is None):
        yield (
            f"checkpoint.non_persistent_ckpt_type={kind} and non_persistent_save_interval={interval}: set both or "
            "none of them"
        )
    if interval and saved.save_interval and interval % saved.save_interval == 0:
        yield (
            f"checkpoint.non_persistent_save_interval={interval} has no effect with checkpoint.save_interval="
            f"{saved.save_interval}, which saves at the same steps: make it shorter"
        )
    for wanted in ("global", "local"):
        key = f"non_persistent_{wanted}_ckpt_dir"
        if getattr(saved, key) is not None and kind != wanted:
            yield f"checkpoint.{key} is set, but non_persistent_ckpt_type={kind}: set {wanted}, or no folder"
    if kind == "local" and saved.non_persistent_local_ckpt_dir is None:
        yield (
            "checkpoint.non_persistent_ckpt_type=local, but non_persistent_local_ckpt_dir is not set: give a "
            "folder on a local disk of every machine"
        )
    if kind is not None and saved.save is None:
        yield f"checkpoint.non_persistent_ckpt_type={kind}, but checkpoint.save is not set: give a run folder"


def in_memory_needs_inprocess_restart(config: RunConfig, world_size: int) -> Iterator[str]:
    """A checkpoint in memory is lost when the process restarts."""
    if config.checkpoint.non_persistent_ckpt_type == "in_memory" and config.inprocess_restart is None:
        yield (
            "checkpoint.non_persistent_ckpt_type=in_memory survives only within one process, but "
            "inprocess_restart is not set: set it, or use local with a folder in memory such as /dev/shm"
        )


def also_hf_copies_whole_models(config: RunConfig, world_size: int) -> Iterator[str]:
    """A copy is made of a checkpoint in the run folder that holds all weights."""
    if not config.checkpoint.also_hf:
        return
    if config.checkpoint.save is None:
        yield "checkpoint.also_hf=True, but checkpoint.save is not set: give a run folder, or set also_hf to False"
    if config.peft is not None:
        yield (
            "checkpoint.also_hf=True with peft: checkpoints hold the adapters alone, set also_hf to False and "
            "export with megatron-bridge adapter"
        )


def most_recent_k_keeps_one(config: RunConfig, world_size: int) -> Iterator[str]:
    """A run keeps at least its newest checkpoint."""
    kept = config.checkpoint.most_recent_k
    if kept != -1 and kept < 1:
        yield f"checkpoint.most_recent_k={kept}: must be at least 1, or -1 to keep all"


def mechanism_is_the_only_one(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of other programs that have one possible value here."""
    for name, only in {**_PARALLEL, "load_main_params_from_ckpt": False}.items():
        if (value := getattr(config.checkpoint, name)) != only:
            yield f"checkpoint.{name}={value} is not possible: leave it {only}"


def finetune_saves_to_another_folder(config: RunConfig, world_size: int) -> Iterator[str]:
    """A run resumes from its own folder, at the saved step."""
    finetune, load, save = config.checkpoint.finetune, config.checkpoint.load, config.checkpoint.save
    if finetune and load and save and Path(load) == Path(save):
        yield (
            f"checkpoint.finetune=True with checkpoint.load={load}, which is checkpoint.save, too: a run resumes "
            "from its own folder, so choose another checkpoint.save"
        )


TIMEOUT_ORDERS = (
    ("soft_timeout", "hard_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)


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
