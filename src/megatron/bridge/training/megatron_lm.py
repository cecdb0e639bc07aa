# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of Megatron-LM as one that a run goes on from: what it says of its run, in this package's words.

Weights lie under the same names. So does the optimizer's state if it was saved per parameter: without a
distributed optimizer, or with ``--dist-ckpt-optim-fully-reshardable``. By default a distributed optimizer saves
its buffers as they are, which only the same tensor and pipeline layout of the same code can read: that is refused.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron.bridge.training.optimizer_state import MASTER, PREFIX
from megatron.bridge.utils.errors import UserError

# Left over in such a checkpoint: states of ranks, and master weights where the model has no others.
BESIDE = ("rng_state", "rerun_state")
THEIR_MASTER = "param"


def is_one(common: dict[str, Any]) -> bool:
    """Whether the common state of a checkpoint is of a run of Megatron-LM."""
    return "checkpoint_version" in common and "opt_param_scheduler" in common and "iteration" in common


def run_state(common: dict[str, Any]) -> dict[str, Any]:
    """What this package saves of a run, from Megatron-LM's common state; nothing there says the layout."""
    args, step = common["args"], common["iteration"]
    samples = getattr(args, "consumed_train_samples", None)
    return {
        "layout": None,
        "progress": {
            "step": step,
            "consumed_train_samples": step * args.global_batch_size if samples is None else samples,
        },
        "scheduler": common["opt_param_scheduler"],
        "optimizer": _scalars(common.get("optimizer")),
        "random": True,
        "base": None,
    }


def refuse_buffers(names: Collection[str], directory: Path) -> None:
    """Refuse an optimizer's state that is not kept per parameter.

    Raises:
        UserError: naming what is there.
    """
    if any(name.startswith(f"{PREFIX}.") for name in names):
        return
    found = next((name for name in sorted(names) if name.startswith(("optimizer", "chained"))), "nothing")
    raise UserError(
        f"checkpoint {directory} holds the optimizer's state as buffers of its own layout ({found}), which cannot "
        "be mapped: save it with --dist-ckpt-optim-fully-reshardable, or take the weights alone with "
        "checkpoint.finetune=true or checkpoint.load_optim=false"
    )


def under_their_names(state: dict[str, ShardedTensor], names: Collection[str]) -> dict[str, ShardedTensor]:
    """Wishes for master weights under the name that a distributed optimizer of Megatron-LM gives them."""
    ours, theirs = f"{PREFIX}.{MASTER}.", f"{PREFIX}.{THEIR_MASTER}."
    renamed = {}
    for place, entry in state.items():
        other = theirs + entry.key.removeprefix(ours)
        wanted = entry.key.startswith(ours) and entry.key not in names and other in names
        renamed[place] = replace(entry, key=other) if wanted else entry
    return renamed


def _scalars(optimizer: dict[Any, Any] | None) -> dict[str, Any] | None:
    """The count of updates, and the loss scales of the optimizers in turn."""
    if optimizer is None:
        return None
    inner = [optimizer[index] for index in sorted(optimizer)] if 0 in optimizer else [optimizer]
    steps = [step for part in inner for step in _steps(part)]
    return {"step": int(max(steps, default=0)), "grad_scalers": [part.get("grad_scaler") or {} for part in inner]}


def _steps(part: dict[str, Any]) -> Iterator[int]:
    inner = part.get("optimizer", part)
    common = (inner.get("state") or {}).get("common_step")
    if common is not None:
        yield int(common)
    for group in inner.get("param_groups", ()):
        if "step" in group:
            yield int(group["step"])
