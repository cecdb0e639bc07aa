# SPDX-License-Identifier: Apache-2.0
"""What the files of a checkpoint say, for programs that look into it themselves."""

from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import paths
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.utils.config import yaml_text


def read_run_config(run_config_filename: str | Path) -> dict[str, Any]:
    """Return the plain data of a ``run_config.yaml``; nothing in it is imported."""
    path = Path(run_config_filename)
    return yaml_text.read(path.read_text(), str(path))


def get_hf_model_id_from_checkpoint(path: str | Path) -> str | None:
    """Return the Hugging Face model that a checkpoint was made from, if it says so."""
    return AutoBridge.get_hf_model_id_from_checkpoint(path)


def get_checkpoint_name(checkpoints_path: str | Path, iteration: int, release: bool = False) -> str:
    """Return the folder of an iteration, or the one of Megatron-LM's releases."""
    if release:
        return str(Path(checkpoints_path) / "release")
    return str(paths.iteration_dir(checkpoints_path, iteration))
