# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Checkpoints of Megatron-FSDP's sharded tensors, for programs that build the state themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from megatron.core.transformer import fsdp_dtensor_checkpoint as core
from megatron.core.utils import get_model_config
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron.bridge.checkpoint import paths
from megatron.bridge.utils.errors import UserError

MODEL = "model"
OPTIMIZER = "optimizer"
CHUNKS = "_model"
"""Entry of a state to load: the chunks that it belongs to."""


def save_fsdp_dtensor_checkpoint(
    checkpoint_path: str | Path,
    state_dict: Mapping[str, Any],
    *,
    cfg: Any = None,
    model: Any,
    storage_writer: Any = None,
    barrier: bool = True,
) -> Any:
    """Write a state with the tensors of Megatron-FSDP. All ranks call this.

    Args:
        checkpoint_path: Folder to write.
        state_dict: ``model``, and if it is saved ``optimizer``, and plain values.
        cfg: Has no effect: the model's config is used.
        model: The chunk that the state belongs to.
        storage_writer: Of ``torch.distributed.checkpoint``; None writes to the folder.
        barrier: Wait until all ranks are done.

    Returns:
        The metadata of ``torch.distributed.checkpoint.save``.
    """
    del cfg
    writer = storage_writer or dcp.FileSystemWriter(checkpoint_path)
    metadata = dcp.save(_storable(state_dict, model), storage_writer=writer)
    if barrier and dist.is_initialized():
        dist.barrier()
    return metadata


def load_fsdp_dtensor_checkpoint(
    load_dir: str | Path,
    ckpt_cfg: Any,
    rank0: bool,
    sharded_state_dict: dict[str, Any] | None,
    iteration: int | None,
    release: bool = False,
    checkpoint_path_override: str | Path | None = None,
    checkpointing_context: dict[str, Any] | None = None,
    cfg: Any = None,
) -> tuple[dict[str, Any], str, bool, str]:
    """Load what ``save_fsdp_dtensor_checkpoint`` wrote, in place. All ranks call this.

    Args:
        load_dir: Root of the checkpoint.
        ckpt_cfg: Has the switch ``strict_fsdp_dtensor_load``, which refuses missing tensors.
        rank0: Load nothing, only find the folder.
        sharded_state_dict: The state to fill, with its chunks as ``_model``.
        iteration: The iteration in ``load_dir``.
        release: Returned.
        checkpoint_path_override: The folder, instead of ``load_dir`` and ``iteration``.
        checkpointing_context: Without use here.
        cfg: The same.

    Returns:
        The state, the folder, ``release``, and the name of the format.
    """
    del cfg, checkpointing_context
    folder = checkpoint_path_override
    if folder is None:
        folder = load_dir if iteration is None else paths.iteration_dir(load_dir, iteration)
    location = (str(folder), release, "fsdp_dtensor")
    if rank0:
        return {}, *location
    if sharded_state_dict is None or CHUNKS not in sharded_state_dict:
        raise UserError(
            f"load_fsdp_dtensor_checkpoint needs sharded_state_dict with the chunks as {CHUNKS!r}: add "
            "sharded_state_dict['_model'] = [chunk]"
        )
    state = {key: value for key, value in sharded_state_dict.items() if key != CHUNKS}
    stored = _storable(state, sharded_state_dict[CHUNKS][0])
    partial = not getattr(ckpt_cfg, "strict_fsdp_dtensor_load", False)
    dcp.load(
        stored,
        storage_reader=dcp.FileSystemReader(folder),
        planner=DefaultLoadPlanner(allow_partial_load=partial),
    )
    # tensors were filled in place; plain values were not
    filled = {key: stored[key] for key in state if key not in (MODEL, OPTIMIZER)}
    return {**state, **filled}, *location


def _storable(state: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the state with the names and parts that do not depend on the parallel layout."""
    storable = dict(state)
    weights = dict(storable[MODEL])
    model = _named_as(model, weights)
    core.handle_fp8_extra_state_case(weights)
    config: Any = get_model_config(model)
    optimizer = storable.get(OPTIMIZER)
    if config.gated_linear_unit and config.activation_func is F.silu:
        weights, optimizer = core.handle_swiglu_in_state_dict(model, weights, optimizer)
    weights, optimizer = core.handle_gdn_in_state_dict(model, weights, optimizer)
    if config.num_moe_experts:
        weights = core.handle_experts_in_state_dict(weights, config.num_moe_experts)
    storable[MODEL] = weights
    if optimizer is not None:
        storable[OPTIMIZER] = optimizer
    preprocess_state_dict_for_uneven_dtensor(storable)
    return storable


def _named_as(model: nn.Module, weights: Mapping[str, Any]) -> nn.Module:
    """Return ``model``, or a module around or inside it, whose ``module.NAME`` is the weight NAME.

    Megatron-Core looks weights up by these names. How many wrappers a program leaves out differs.
    """
    name = next(key for key, value in weights.items() if isinstance(value, torch.Tensor))
    around = nn.Module()
    around.module = model
    inside: Any = getattr(model, "module", model)
    for candidate in (model, around, inside):
        try:
            candidate.get_parameter(f"module.{name}")
        except AttributeError:
            continue
        return candidate
    raise UserError(
        f"the model has no weight {name} of the state: give the chunk whose state_dict_for_save_checkpoint() it is"
    )
