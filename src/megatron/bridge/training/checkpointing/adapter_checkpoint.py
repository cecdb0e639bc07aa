# SPDX-License-Identifier: Apache-2.0
"""Load the adapters of a run's checkpoint outside of the run."""

from pathlib import Path
from typing import Any

from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.peft.checkpoint import load_adapters, saved_base


def base_name(path: Path) -> str | None:
    """The path or hub id of the base model on which the adapters were trained."""
    _, base = saved_base(path)
    return None if base is None else base["name"]


def adapted_model(path: Path, base: str, trust_remote_code: bool, check: bool) -> tuple[AutoBridge, list[Any]]:
    """Load the base model, a directory or hub id, with the adapters of a checkpoint, in one process.

    ``check`` refuses a base model on which the adapters were not trained.
    """
    bridge = AutoBridge.from_hf_pretrained(base, trust_remote_code=trust_remote_code)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    load_adapters(model, path, check)
    return bridge, model
