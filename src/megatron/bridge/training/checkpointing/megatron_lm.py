# SPDX-License-Identifier: Apache-2.0
"""Resume from a checkpoint of Megatron-LM: convert its run state to the state of this package.

The weights have the same names. So has the optimizer state if it was saved per parameter: without a distributed
optimizer, or with ``--dist-ckpt-optim-fully-reshardable``. By default a distributed optimizer saves its raw
buffers, which only the same code with the same tensor and pipeline parallel sizes can read: such a checkpoint is
refused.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron.bridge.training.optim.optimizer_state import MASTER, PREFIX
from megatron.bridge.utils.errors import UserError

IGNORED = ("rng_state", "rerun_state")  # states of single ranks, which are not loaded
MEGATRON_LM_MASTER = (
    "param"  # the key of main parameters in the state of Megatron-LM's distributed optimizer
)


def is_megatron_lm(common: dict[str, Any]) -> bool:
    return (
        "checkpoint_version" in common and "opt_param_scheduler" in common and "iteration" in common
    )


def run_state(common: dict[str, Any]) -> dict[str, Any]:
    """The run state of this package from Megatron-LM's common state, which does not contain the parallel sizes."""
    args = common["args"]
    step = common["iteration"]
    samples = getattr(args, "consumed_train_samples", None)
    return {
        "layout": None,
        "progress": {
            "step": step,
            "consumed_train_samples": step * args.global_batch_size if samples is None else samples,
        },
        "scheduler": common["opt_param_scheduler"],
        "optimizer": _optimizer_scalars(common.get("optimizer")),
        "random": True,
        "base": None,
    }


def check_optimizer_format(names: Collection[str], directory: Path) -> None:
    """Refuse optimizer state that is not saved per parameter."""
    if any(name.startswith(f"{PREFIX}.") for name in names):
        return
    first_name = next(
        (name for name in sorted(names) if name.startswith(("optimizer", "chained"))), "nothing"
    )
    raise UserError(
        f"checkpoint {directory} holds the optimizer state as raw buffers ({first_name}), which cannot be mapped to "
        "parameters: save it with --dist-ckpt-optim-fully-reshardable, or load only the weights with "
        "checkpoint.finetune=true or checkpoint.load_optim=false"
    )


def with_megatron_lm_keys(
    state: dict[str, ShardedTensor], names: Collection[str]
) -> dict[str, ShardedTensor]:
    """``state`` with the keys under which a distributed optimizer of Megatron-LM saves the main parameters."""
    own_prefix = f"{PREFIX}.{MASTER}."
    megatron_lm_prefix = f"{PREFIX}.{MEGATRON_LM_MASTER}."
    renamed = {}
    for name, entry in state.items():
        megatron_lm_key = megatron_lm_prefix + entry.key.removeprefix(own_prefix)
        is_renamed = (
            entry.key.startswith(own_prefix) and entry.key not in names and megatron_lm_key in names
        )
        renamed[name] = replace(entry, key=megatron_lm_key) if is_renamed else entry
    return renamed


def _optimizer_scalars(optimizer: dict[Any, Any] | None) -> dict[str, Any] | None:
    """The number of updates, and the loss scaler of each optimizer."""
    if optimizer is None:
        return None
    inner = [optimizer[index] for index in sorted(optimizer)] if 0 in optimizer else [optimizer]
    steps = [step for part in inner for step in _update_counts(part)]
    return {
        "step": int(max(steps, default=0)),
        "grad_scalers": [part.get("grad_scaler") or {} for part in inner],
    }


def _update_counts(part: dict[str, Any]) -> Iterator[int]:
    inner = part.get("optimizer", part)
    common = (inner.get("state") or {}).get("common_step")
    if common is not None:
        yield int(common)
    for group in inner.get("param_groups", ()):
        if "step" in group:
            yield int(group["step"])
