# SPDX-License-Identifier: Apache-2.0
"""The state that NVIDIA's ModelOpt saves next to the weights of a checkpoint."""

from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import paths
from megatron.bridge.checkpoint.model_io import as_chunks, unwrap
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import installed

STATE = "modelopt_state"
_RESTORE = "modelopt.torch.opt.plugins"


def _get_modelopt_checkpoint_path(checkpoint_path: str | Path, step: int | None = None) -> Path:
    """Return the folder of one iteration, or the given one if it has the state itself.

    ModelOpt imports it under this name.
    """
    root = Path(checkpoint_path)
    if step is not None:
        return paths.iteration_dir(root, step)
    if (root / STATE).is_dir():
        return root
    try:
        return paths.resolve(root)
    except UserError:
        return root


def has_modelopt_state(checkpoint_path: str | Path, ckpt_step: int | None = None) -> bool:
    """Return whether a checkpoint has a state of ModelOpt, that is, of a model that it changed.

    Args:
        checkpoint_path: Root of a checkpoint, or one of its iterations.
        ckpt_step: The iteration; None is the newest.
    """
    return (_get_modelopt_checkpoint_path(checkpoint_path, ckpt_step) / STATE).is_dir()


def load_modelopt_state(
    model: Any, checkpoint_path: str | Path, ckpt_step: int | None = None
) -> None:
    """Let ModelOpt change ``model``, a chunk or all of this rank, as it changed the model of the checkpoint.

    Args:
        model: Not wrapped for data parallelism yet.
        checkpoint_path: Root of a checkpoint, or one of its iterations.
        ckpt_step: The iteration; None is the newest.

    Raises:
        UserError: there is no such state, or ModelOpt is not installed.
    """
    folder = _get_modelopt_checkpoint_path(checkpoint_path, ckpt_step)
    if not has_modelopt_state(checkpoint_path, ckpt_step):
        raise UserError(
            f"{folder} has no {STATE}: ask has_modelopt_state first, and load its weights alone"
        )
    if not installed("modelopt"):
        raise UserError(
            f"{folder} has a state of ModelOpt, which is not installed: `uv pip install nvidia-modelopt`"
        )
    from importlib import import_module

    restore: Any = import_module(_RESTORE).restore_sharded_modelopt_state
    restore([unwrap(chunk) for chunk in as_chunks(model)], str(folder))
