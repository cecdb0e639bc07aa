# SPDX-License-Identifier: Apache-2.0
"""The config of a program that has a loop and data of its own; see docs/rl.md."""

from dataclasses import fields
from typing import Any

from megatron.bridge.data.config import MockGPTDatasetConfig
from megatron.bridge.training.config.resolve import Resolved
from megatron.bridge.training.config.schedule_lengths import lengths
from megatron.bridge.utils.config.serialize import copy_config

COMPLETED = ("ddp", "optimizer", "scheduler")


def complete(config: Any, world_size: int | None) -> Resolved[Any]:
    """Check a ``ConfigContainer`` whose dataset is None, and fill in what these blocks of it leave open.

    Such programs set every field whatever the model is, so settings of features that are off become notes.

    Raises:
        UserError: one line for each problem, all of them together.
    """
    checked: Any = copy_config(config)
    checked.dataset = MockGPTDatasetConfig(seq_length=config.model.seq_length)
    notes = [f"{block}.{name} has no effect: {why}" for block, name, why in _ineffective(checked)]
    resolved, config.optimizer.params_dtype = checked.resolve(world_size), None
    resolved.notes.extend(notes)
    for name in COMPLETED:
        block, derived = getattr(config, name), getattr(resolved.config, name)
        for entry in fields(block):
            if getattr(block, entry.name) is None:
                setattr(block, entry.name, getattr(derived, entry.name))
    config.scheduler.lengths = lengths(resolved.config)
    return resolved


def _ineffective(config: Any) -> list[tuple[str, str, str]]:
    """Unset what has no effect, and say so."""
    model, found = config.model, []
    for block, name, off, why in (
        ("model", "expert_tensor_parallel_size", not model.num_moe_experts, "the model has no experts"),
        ("ddp", "data_parallel_sharding_strategy", not config.ddp.use_megatron_fsdp, "weights are not sharded"),
        ("optimizer", "params_dtype", True, "it follows the model"),
        ("checkpoint", "save_interval", config.checkpoint.save is None, "checkpoint.save is not set yet"),
    ):
        if off and getattr(getattr(config, block), name) is not None:
            setattr(getattr(config, block), name, None)
            found.append((block, name, why))
    return found
