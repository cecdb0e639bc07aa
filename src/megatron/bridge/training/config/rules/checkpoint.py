# SPDX-License-Identifier: Apache-2.0
"""Rules on checkpoints (what is saved and loaded, where, and how), on restarts and on straggler detection."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from megatron.bridge.training.config.run_config import RunConfig

_PARALLEL = {"fully_parallel_save": True, "fully_parallel_load": True}


def non_persistent_saves_lie_between(config: RunConfig, world_size: int) -> Iterator[str]:
    """A checkpoint that is kept makes one of the same step useless."""
    saved = config.checkpoint
    interval = saved.non_persistent_save_interval
    if interval and saved.save_interval and interval % saved.save_interval == 0:
        yield (
            f"checkpoint.non_persistent_save_interval={interval} has no effect with checkpoint.save_interval="
            f"{saved.save_interval}, which saves at the same steps: make it shorter"
        )


def most_recent_k_keeps_one(config: RunConfig, world_size: int) -> Iterator[str]:
    """A run keeps at least its newest checkpoint."""
    count = config.checkpoint.most_recent_k
    if count != -1 and count < 1:
        yield f"checkpoint.most_recent_k={count}: must be at least 1, or -1 to keep all"


def mechanism_is_the_only_one(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of other programs that have one possible value here."""
    for name, only in {**_PARALLEL, "load_main_params_from_ckpt": False}.items():
        if (value := getattr(config.checkpoint, name)) != only:
            yield f"checkpoint.{name}={value} is not possible: leave it {only}"


def finetune_saves_to_another_folder(config: RunConfig, world_size: int) -> Iterator[str]:
    """A run resumes from its own folder, at the saved step."""
    finetune = config.checkpoint.finetune
    load = config.checkpoint.load
    save = config.checkpoint.save
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


def inprocess_restart_timeouts_are_ordered(config: RunConfig, world_size: int) -> Iterator[str]:
    """A rank is interrupted before it is killed, and killed before the others stop waiting for it."""
    for order in TIMEOUT_ORDERS if config.inprocess_restart is not None else ():
        values = [getattr(config.inprocess_restart, name) for name in order]
        if any(first >= second for first, second in pairwise(values)):
            given = ", ".join(
                f"{name}={value:g}" for name, value in zip(order, values, strict=True)
            )
            yield f"inprocess_restart: {given} must grow in this order"


def simulated_fault_rank_exists(config: RunConfig, world_size: int) -> Iterator[str]:
    """A fault in a rank that does not exist would never happen."""
    rank = None if config.ft is None else config.ft.simulated_fault_rank
    if rank is not None and not 0 <= rank < world_size:
        yield f"ft.simulated_fault_rank={rank}: must lie between 0 and {world_size - 1}"
