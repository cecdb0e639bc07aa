# SPDX-License-Identifier: Apache-2.0
"""Rules on what a run does about faults."""

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
