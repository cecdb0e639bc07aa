# SPDX-License-Identifier: Apache-2.0
"""Load the adapters of a run's checkpoint outside of the run."""

from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import loading, paths
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.peft.checkpoint import fingerprint, load_adapters
from megatron.bridge.utils.errors import UserError


def base_name(path: Path) -> str:
    """The path or hub id of the base model on which the adapters were trained."""
    return str(_saved_base(path)[1]["name"])


def adapted_model(path: Path, base: str, trust_remote_code: bool, check: bool) -> tuple[AutoBridge, list[Any]]:
    """Load the base model, a directory or hub id, with the adapters of a checkpoint, in one process.

    ``check`` refuses a base model on which the adapters were not trained.
    """
    directory, saved = _saved_base(path)
    bridge = AutoBridge.from_hf_pretrained(base, trust_remote_code=trust_remote_code)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    if check and fingerprint(model) != saved["fingerprint"]:
        raise UserError(
            f"checkpoint {directory} holds adapters of {saved['name']}, whose weights differ from those of "
            f"{base}: use the base model on which the adapters were trained"
        )
    load_adapters(model, directory)
    return bridge, model


def _saved_base(path: Path) -> tuple[Path, dict[str, str]]:
    """The directory of the iteration, and the name and fingerprint of the adapters' base model."""
    directory = on_first_rank(lambda: paths.resolve(path))
    saved = loading.load_common(directory).get("run", {}).get("base")
    if saved is None:
        raise UserError(f"checkpoint {directory} holds no adapters: use `megatron-bridge export` for its weights")
    return directory, saved
